"""Patterns, registries and the sentences they fail with."""

from __future__ import annotations

import pytest

from quark.core.names.patterns import first_match, matches, matches_any, require_matches
from quark.core.names.registry import Registry
from quark.errors import (
    CalibrationError,
    ConfigError,
    FormatError,
    MissingDependencyError,
    NonFiniteError,
    NotSupportedError,
    OutputError,
    OutputExistsError,
    QuarkError,
    ShapeError,
    did_you_mean,
)

NAMES = ["lm_head"] + [f"model.layers.{i}.self_attn.{p}_proj" for i in range(12) for p in "qkvo"]


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", "*.q_proj", True),
        ("model.layers.0.self_attn.q_proj", "q_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "LM_HEAD", False),
        ("a.b", "a?b", True),
        ("a.b1", "a.b[12]", True),
        ("model.layers.10.mlp", r"re:model\.layers\.\d+\.mlp", True),
        ("model.layers.10.mlp.gate", r"re:model\.layers\.\d+\.mlp", False),
        ("x.model.layers.10.mlp", r"re:model\.layers\.\d+\.mlp", False),
        ("a.b", "re:a.b|c", True),
        ("a.bc", "re:a.b|c", False),
    ],
)
def test_matches(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected
    assert matches_any(name, ["nothing", pattern]) is expected


def test_the_first_rule_wins() -> None:
    rules = {"*.q_proj": 1, "model.*": 2, "*": 3}
    assert [first_match(name, rules) for name in ("a.q_proj", "model.q_proj", "model.x", "y")] == [1, 1, 2, 3]
    assert first_match("y", {"x": 1}) is None and first_match("y", {}) is None
    assert not matches_any("y", [])


def test_patterns_that_match_pass() -> None:
    require_matches(["lm_head", "*.q_proj", r"re:.*\.11\..*"], NAMES, "exclude")
    require_matches([], NAMES, "exclude")


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("*.q_prj", ["'*.q_prj'", "Did you mean 'q_proj'"]),
        ("lm_heed", ["Did you mean 'lm_head'"]),
        ("q_proj", ["Names that contain it: model.layers.0.self_attn.q_proj, model.layers.1.self_attn.q_proj"]),
        ("layers.3.", ["model.layers.3.self_attn.q_proj"]),
        ("re:lm_(head", ["not a regular expression"]),
        ("re:nothing", ["'re:nothing'", "matches no layer"]),
    ],
)
def test_a_pattern_without_a_match_names_near_ones(pattern: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        require_matches(["*.k_proj", pattern], NAMES, "exclude")
    assert str(error.value).startswith("exclude: ")
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_few_names_are_all_possible() -> None:
    with pytest.raises(ConfigError, match="'block.fc1'"):
        require_matches(["block.fc9"], ["block.fc1", "head"], "layer_quant_config")


def test_registry_is_a_mapping_with_helpful_keys() -> None:
    registry: Registry[int] = Registry("scheme")
    assert registry.register("fp8", 1) == 1
    registry.register("int8", 2)
    assert dict(registry) == {"fp8": 1, "int8": 2} and list(registry) == ["fp8", "int8"] and len(registry) == 2
    assert "fp8" in registry and "fp9" not in registry
    with pytest.raises(ConfigError, match="Unknown scheme 'fp9'. Did you mean 'fp8'?"):
        registry["fp9"]
    with pytest.raises(ConfigError, match="Possible: 'fp8', 'int8'"):
        registry["zzz"]
    with pytest.raises(ConfigError, match="Unknown scheme 8"):
        registry[8]  # type: ignore[index]
    with pytest.raises(ConfigError, match="'fp8' is registered already"):
        registry.register("fp8", 3)
    assert registry["fp8"] == 1
    assert registry.unregister("fp8") == 1 and "fp8" not in registry
    with pytest.raises(ConfigError):
        registry.unregister("fp8")


def test_did_you_mean() -> None:
    assert did_you_mean("uint4_wo_12", ["uint4_wo_128", "fp8"]) == "Did you mean 'uint4_wo_128'?"
    assert did_you_mean("int", ["int8", "int4"]) in ("Did you mean 'int8' or 'int4'?", "Did you mean 'int4' or 'int8'?")
    assert did_you_mean("zzz", ["b", "a", "a"]) == "Possible: 'a', 'b'."
    assert did_you_mean("zzz", []) == "There is nothing to choose from."
    many = did_you_mean("zzz", [f"name{i:02}" for i in range(50)])
    assert "'name39' and 10 more." in many and "name40" not in many
    assert len(did_you_mean("aaaa", ["aaaab", "aaaac", "aaaad", "aaaae"], limit=2).split(" or ")) == 2


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (CalibrationError, ValueError),
        (NonFiniteError, ValueError),
        (ShapeError, ValueError),
        (FormatError, ValueError),
        (OutputExistsError, FileExistsError),
        (OutputError, OSError),
        (NotSupportedError, NotImplementedError),
        (MissingDependencyError, ImportError),
    ],
)
def test_errors_are_quarks_and_pythons(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, QuarkError) and issubclass(error, builtin)
    assert str(error("what and where")) == "what and where"
