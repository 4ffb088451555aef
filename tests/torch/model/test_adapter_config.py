"""Configs of adapters: what PEFT would load, and patterns that it would run, of a stranger's folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quark.errors import FormatError, NotSupportedError
from quark.torch.model.adapter_config import require_local, with_names

FILE = Path("adapter/adapter_config.json")
NAMES = ["", "model", *(f"model.layers.{i}.{leaf}" for i in (0, 1) for leaf in ("self_attn.q_proj", "mlp.up_proj"))]
HOSTILE = "(a+)+(b+)+(.*a.*)+x"
LORA = {"peft_type": "LORA", "base_model_name_or_path": "x", "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "changes",
    [{"peft_type": "XLORA", "adapters": {"0": "org/name"}}, {"peft_type": None}, {"megatron_config": {"a": 1}},
     {"arrow_config": {"top_k": 1}}],
)  # fmt: skip
def test_an_adapter_that_would_load_more_than_its_folder_is_refused(changes: dict[str, Any]) -> None:
    require_local(FILE, LORA)
    with pytest.raises(NotSupportedError, match=r"adapter_config\.json: "):
        require_local(FILE, LORA | changes)


def test_patterns_become_the_names_that_they_mean() -> None:
    said = LORA | {"target_modules": r".*(?:self_attn|mlp).*(?:q_proj|k_proj).*", "rank_pattern": {
        r"layers\.1\..*_proj": 8, "up_proj": 4}}  # fmt: skip
    changed = with_names(FILE, said, NAMES)
    assert changed["target_modules"] == [name for name in NAMES if "q_proj" in name]
    ranks = {name: changed["rank_pattern"].get(re.escape(name)) for name in NAMES[2:]}
    assert [*ranks.values()] == [None, 4, 8, 8]
    assert with_names(FILE, LORA | {"target_modules": "all-linear"}, NAMES) == {}


@pytest.mark.parametrize(
    "changes",
    [{"target_modules": HOSTILE}, {"rank_pattern": {HOSTILE: 1}},
     {"alpha_pattern": {HOSTILE: 1}}, {"modules_to_save": [HOSTILE]}, {"layers_pattern": HOSTILE},
     {"target_parameters": [HOSTILE]}, {"feedforward_modules": "(a"}, {"target_modules": "none"}],
)  # fmt: skip
def test_a_pattern_without_an_end_is_a_line(changes: dict[str, Any]) -> None:
    names = [*NAMES, "model." + "ab" * 2000]
    with pytest.raises(FormatError, match=rf"adapter_config\.json: {next(iter(changes))}"):
        with_names(FILE, LORA | changes, names)


def test_a_pattern_that_matches_nothing_leaves_nothing_out() -> None:
    assert with_names(FILE, LORA | {"exclude_modules": HOSTILE}, NAMES) == {"exclude_modules": []}
