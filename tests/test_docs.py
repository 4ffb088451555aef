"""README and docs/ are true: every snippet and command runs as printed, every list is what the code has."""

from __future__ import annotations

import builtins
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.contracts.test_dtypes as dtype_contracts
import tests.contracts.test_observers as observer_contracts
import tests.contracts.test_passes as pass_contracts
import tests.contracts.test_schemes_numerics as scheme_contracts
import tests.contracts.test_torch_algorithms as algorithm_contracts
from quark import errors
from quark.base.log import logger
from quark.commands import COMMANDS
from quark.compat.torch_names.shorthand_specs import OBSERVER_METHODS, TwoStageSpec
from quark.core.dtypes import DTYPES
from quark.core.granularity import Granularity, PerGroup
from quark.core.names.registry import Registry
from quark.core.names.scheme_families import FAMILIES
from quark.core.observers import OBSERVERS
from quark.core.rounding import RoundType
from quark.core.schemes import SCHEMES
from quark.core.spec import ScaleRule, ScaleType, TensorSpec
from quark.errors import NotSupportedError
from quark.gguf import MIXES
from quark.goals import GOALS
from quark.onnx.algorithms import AFTER, BEFORE
from quark.onnx.config.algo_configs import AlgoConfig as OnnxAlgoConfig
from quark.onnx.operators import ON_REQUEST, RULES
from quark.onnx.passes import PASSES
from quark.onnx.search.settle import PRECISION
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import ALGORITHMS as TORCH_ALGORITHMS
from quark.torch.checkpoint.loading import empty_params
from quark.torch.config.algo_configs import RotationConfig
from quark.torch.config.named_algorithms import ALGO_CONFIGS
from quark.torch.config.selectors import SELECTORS
from quark.torch.config.tensor.observer_classes import OBSERVER_CLASSES
from quark.torch.formats import FORMATS
from quark.torch.formats.quark.layout import PACK_METHODS, QuarkLayout
from quark.torch.layers import LAYERS
from quark.torch.quantization.config import config as config_address
from tests.commands.program import quark
from tests.models.torch_zoo import mlp, tiny_llama

ROOT = Path(__file__).parent.parent
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide" / "pytorch.md"
REFERENCE = GUIDE.with_name("pytorch_reference.md")
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
NEW_FILES = {"trimmed.py", "conv1d.py", "plain.py", "types.py"}
"""Files that the pages under docs/add tell a reader to make."""
REGISTRIES: tuple[Registry[Any], ...] = (
    DTYPES,
    SCHEMES,
    OBSERVERS,
    OBSERVER_CLASSES,
    FORMATS,
    PACK_METHODS,
    ALGO_CONFIGS,
    LLMTemplate._schemes,
)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=page_name)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which the text starts."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> list[str]:
    """The `quark` lines of a console block."""
    shell = block.language in ("console", "bash", "sh")
    return [line for line in block.text.splitlines() if line.startswith("quark ")] if shell else []


# What is printed is run. ---------------------------------------------------------------------------------------------


@pytest.fixture
def clean() -> Iterator[None]:
    """What a page registers ends with its test."""
    dicts: list[dict[Any, Any]] = [
        *(r._entries for r in REGISTRIES),
        LAYERS,
        PASSES,
        RULES,
        ON_REQUEST,
        AFTER,
        BEFORE,
        PRECISION,
        TORCH_ALGORITHMS,
        LLMTemplate._registered,
    ]
    before = [dict(entries) for entries in dicts]
    yield
    for entries, saved in zip(dicts, before, strict=True):
        entries.clear()
        entries.update(saved)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary working directory from which the examples are reachable as from a clone."""
    try:
        (tmp_path / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    except OSError:  # Windows without the right to make links
        shutil.copytree(ROOT / "examples" / "models", tmp_path / "examples" / "models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@EVERY_PAGE
@pytest.mark.usefixtures("clean", "workplace")
def test_snippets_and_commands_run_as_printed(page: Path) -> None:
    """The level and the handlers that a page gives the log end with the test."""
    torch.manual_seed(0)
    level, handlers = logger.level, [*logger.handlers]
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks(page):
        if block.language == "python":
            # Empty lines in front, so that a traceback shows the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            exec(code, namespace)
        for line in commands(block):
            done = quark(*shlex.split(line)[1:])
            assert (done.code, done.err) == (0, ""), f"{page_name(page)}: {line}\n{done.err}"
    CONTRACTS.get(page_name(page), lambda: None)()
    logger.setLevel(level)
    logger.handlers[:] = handlers


def dtype_keeps_its_contracts() -> None:
    row = DTYPES["fp5_e2m2"]
    dtype_contracts.test_row_is_consistent(row.name)
    dtype_contracts.test_rounding_is_idempotent_on_every_code(row)
    for library in (np.asarray, torch.from_numpy):
        dtype_contracts.test_float_codes_are_ieee_fields(row, library)
        for rounding in RoundType:
            dtype_contracts.test_rounding_finds_the_nearest_value(row, rounding)
            dtype_contracts.test_rounding_keeps_nan_and_saturates_infinity(row, rounding, library)


def observers_keep_their_contracts() -> None:
    libraries = (np.asarray, torch.from_numpy)
    for name in ("trimmed", "exactly_trimmed"):
        for kind in ("int8", "uint8-asymmetric", "fp8"):
            tensor = observer_contracts.SPECS[kind]
            observer_contracts.test_numpy_and_torch_agree(name, tensor)
            observer_contracts.test_parameters_have_the_stored_shape(name, tensor)
            observer_contracts.test_merging_leaves_the_other_as_it_was(name, tensor)
            for library in libraries:
                observer_contracts.test_merging_is_seeing_everything(name, tensor, library)
                observer_contracts.test_states_are_merged_in_any_order(name, tensor, library)
        observer_contracts.test_batch_size_changes_nothing(name, observer_contracts.SPECS["int8"])
        observer_contracts.test_constant_and_zero_tensors(name)
        observer_contracts.test_one_range_is_not_for_channels(name)
        observer_contracts.test_nothing_observed(name, np.asarray)
        observer_contracts.test_values_that_are_not_finite(name, np.nan, torch.from_numpy)
    observer_contracts.test_a_statistics_file_serves_every_observer("trimmed", Path())


def scheme_keeps_its_contracts() -> None:
    weight = SCHEMES["int8_wo_64"].weight
    assert weight is not None
    scheme_contracts.test_numpy_and_torch_agree(weight)
    scheme_contracts.test_codes_scales_and_errors_are_in_range(weight)
    scheme_contracts.test_signal_to_noise_is_what_the_width_gives(weight)


def pass_keeps_its_contracts() -> None:
    for model in ("cnn", "clutter"):
        pass_contracts.test_a_pass_keeps_outputs_and_twice_is_once("merge_relus", model)
    pass_contracts.test_bodies_of_if_stay_as_they_are("merge_relus")


def algorithm_keeps_its_contracts() -> None:
    kind = next(kind for kind in TORCH_ALGORITHMS if kind.__name__ == "CorrectBiasConfig")
    row = algorithm_contracts.Row(kind(), share=0.5, loss=algorithm_contracts.mean_output_error)  # type: ignore[call-arg]
    algorithm_contracts.ROWS[kind] = row
    try:
        algorithm_contracts.test_it_changes_the_model(kind)
        algorithm_contracts.test_it_is_better_than_rounding_to_nearest(kind)
        algorithm_contracts.test_what_keeps_the_float_model_keeps_what_it_computes(kind)
        algorithm_contracts.test_its_result_survives_freeze_export_and_reload(kind, Path.cwd())
    finally:
        del algorithm_contracts.ROWS[kind]


CONTRACTS: dict[str, Callable[[], None]] = {
    "docs/add/algorithm.md": algorithm_keeps_its_contracts,
    "docs/add/dtype.md": dtype_keeps_its_contracts,
    "docs/add/pass.md": pass_keeps_its_contracts,
    "docs/add/observer.md": observers_keep_their_contracts,
    "docs/add/scheme.md": scheme_keeps_its_contracts,
}
"""The examples of docs/add, held to what "tests it" promises."""


# Links, paths and targets. -------------------------------------------------------------------------------------------


@EVERY_PAGE
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        assert goal.is_relative_to(ROOT) and goal.exists(), f"{page_name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(goal), f"{page_name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"[`\s]((?:src|tests|docs|examples)/[\w./]*\w/?)[`\s]", text):
        if Path(path).name in NEW_FILES:
            path = Path(path).parent.as_posix()
        assert (ROOT / path).exists(), f"{page_name(page)} names {path}"


def test_the_files_that_the_page_of_rooms_walks_through_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", text))
    source = ROOT / "src" / "quark"
    assert len(named) > 40
    assert not [path for path in named if not (source / path).exists() and not (ROOT / path).exists()]


@EVERY_PAGE
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    shown = {m for block in blocks(page) for m in re.findall(r"^make (\w+)", block.text, re.M)}
    assert shown <= targets


@EVERY_PAGE
def test_pages_are_plain(page: Path) -> None:
    """Lines fit a screen (tables, links and commands aside), and no place of one machine is named."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/root/|/tmp/|\\Users\\", text)
    for line in text.splitlines():
        assert len(line) <= 120 or line.startswith(("|", "quark ")), f"{page_name(page)}: {line}"


# Lists. --------------------------------------------------------------------------------------------------------------


def table(page: Path, heading: str, column: str) -> list[list[str]]:
    """The rows of the first table under a heading whose first column is called `column`."""
    text = page.read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    found = re.search(rf"^\| {column} \|.*\n\|[ |-]*\n((?:\|.*\n)+)", text, re.M)
    assert found, f"no table {column!r} under {heading!r}"
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in found[1].splitlines()]


def names(cell: str) -> list[str]:
    """The words in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def test_what_is_registered_is_listed() -> None:
    page = ROOT / "docs" / "reference" / "supported.md"
    listed = {row[0]: names(row[1]) for row in table(page, "Names", "What")}
    rows = DTYPES.values()
    expected = {
        "Integer types": [row.name for row in rows if not row.is_float and not row.is_block],
        "Float types": [row.name for row in rows if row.is_float],
        "Shared-exponent types": [row.name for row in rows if row.is_block],
        "Granularities": [kind.__name__ for kind in Granularity.__subclasses__()],
        "Scale types": [kind.name for kind in ScaleType],
        "Exponent rules of E8M0 scales": [rule.value for rule in ScaleRule],
        "Observers": list(OBSERVERS),
        "Layers": [kind.__name__ for kind in LAYERS],
        "File formats": list(FORMATS),
    }
    assert {"int2_wo_64", "nvfp4"} == set(listed.pop("Schemes")) <= set(SCHEMES)
    assert {what: sorted(found) for what, found in listed.items()} == {
        what: sorted(found) for what, found in expected.items()
    }


def test_readme_shows_every_command() -> None:
    shown = {line.split()[1] for block in blocks(README) for line in commands(block)}
    assert shown == set(COMMANDS)


def test_every_page_of_additions_is_linked() -> None:
    linked = set(re.findall(r"\]\((docs/add/\w+\.md)\)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert linked == {page_name(addition) for addition in (ROOT / "docs" / "add").glob("*.md")}


def test_what_readme_calls_not_there_yet_says_so() -> None:
    listed = README.read_text(encoding="utf-8").split("# What is not there yet\n", 1)[1].lower()
    template = LLMTemplate.get("llama")
    fused = mlp()
    fused.register_parameter("experts", torch.nn.Parameter(torch.zeros(2, 4, 4)))
    calls: list[Callable[[], object]] = [
        lambda: ModelQuantizer(template.get_config("int8_wo")).quantize_model(fused),
    ]
    assert "train_smooth" in listed
    learned = replace(template.get_config("int8"), algo_config=[RotationConfig(trainable=True, train_smooth=True)])
    calls.append(lambda: ModelQuantizer(learned).quantize_model(tiny_llama()))
    for call in calls:
        with pytest.raises(NotSupportedError):
            call()


def test_the_guide_lists_every_goal() -> None:
    rows = table(ROOT / "docs" / "guide" / "goals.md", "A goal in place of a scheme", "`--for`")
    assert [names(row[0]) for row in rows] == [[name] for name in GOALS]


SCHEME_ROWS = table(REFERENCE, "The schemes", "Scheme")


def test_the_guide_lists_every_scheme_in_order() -> None:
    assert [names(row[0]) for row in SCHEME_ROWS] == [[name] for name in SCHEMES]


@pytest.mark.slow
@pytest.mark.parametrize("row", SCHEME_ROWS, ids=lambda row: row[0].strip("`"))
def test_the_row_of_a_scheme_is_true(row: list[str]) -> None:
    layer = SCHEMES[names(row[0])[0]]
    weight, activation = layer.weight, layer.input
    assert weight is not None
    assert float(row[3]) == pytest.approx(bits(weight), abs=0.0051)
    assert row[4] == ("yes" if layer.needs_data else "no")
    if row[1].startswith("another name"):
        assert layer == SCHEMES[names(row[1])[0]]
        return
    assert ("asymmetric" in row[1]) == (not weight.symmetric)
    assert ("E8M0" in row[1]) == (weight.scale_type is ScaleType.float8_e8m0fnu and not weight.dtype.is_block)
    assert re.findall(r"(?:groups|blocks) of (\d+)", row[1]) == group_sizes(weight)
    if activation is None:
        assert row[2] == "float"
        return
    assert ("dynamic" in row[2]) == activation.dynamic
    assert ("static" in row[2]) == layer.needs_data
    if row[2].startswith("the same"):
        assert activation == replace(weight, dynamic=True)
    else:
        assert re.findall(r"(?:groups|blocks) of (\d+)", row[2]) == group_sizes(activation)


def group_sizes(spec: TensorSpec) -> list[str]:
    return [str(spec.granularity.size)] if isinstance(spec.granularity, PerGroup) else []


def bits(spec: TensorSpec) -> float:
    """Bits of one weight of a 4096 x 4096 layer of a bfloat16 model on disk, scales and zero points included."""
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    stored = QuarkLayout(spec, x.dtype).store(x, empty_params(spec, tuple(x.shape)))
    return 8 * sum(tensor.numel() * tensor.element_size() for tensor in stored.values()) / x.numel()


def test_the_guide_lists_every_shorthand_spec() -> None:
    listed = [name for row in table(REFERENCE, "A tensor", "Family") for name in names(row[1])]
    classes = {name: getattr(config_address, name) for name in dir(config_address) if name.endswith("Spec")}
    concrete = [
        name
        for name, kind in classes.items()
        if hasattr(kind, "dtype") or (issubclass(kind, TwoStageSpec) and kind is not TwoStageSpec)
    ]
    concrete = [name for name in concrete if name not in ("QuantizationSpec", "DataTypeSpec", "OCP_MXSpec")]
    assert sorted(listed) == sorted(concrete)


def test_the_guide_lists_every_observer() -> None:
    rows = table(REFERENCE, "Observers", "Observer")
    assert [names(row[0]) for row in rows] == [[name] for name in OBSERVERS]
    for row in rows:
        (name,) = names(row[0])
        assert (row[2] == "per tensor") == OBSERVERS[name].per_tensor_only, name
    text = REFERENCE.read_text(encoding="utf-8")
    assert all(f"`{method}`" in text for method in OBSERVER_METHODS)


def test_the_guides_name_every_algorithm() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "guide").glob("*.md"))
    onnx_algorithms = {kind for kind in (*BEFORE, *PRECISION, *AFTER) if issubclass(kind, OnnxAlgoConfig)}
    for kind in (*TORCH_ALGORITHMS, *onnx_algorithms):
        assert kind.__name__ in text, f"no page under docs/guide names {kind.__name__}"


def test_the_guide_lists_every_selector() -> None:
    rows = table(GUIDE, "Which layer gets what", "Selector")
    assert [names(row[0]) for row in rows] == [[name] for name in SELECTORS]


def test_the_guide_lists_every_error() -> None:
    listed = {names(row[0])[0]: names(row[2])[0] for row in table(REFERENCE, "Errors", "Error")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    assert set(listed) == {kind.__name__ for kind in kinds} - {"QuarkError"}
    for name, builtin in listed.items():
        assert issubclass(getattr(errors, name), getattr(builtins, builtin))


def test_every_scheme_that_a_page_names_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"(?:--scheme |get_config\(\s*\")([\w]+)", page.read_text(encoding="utf-8")):
            added = {"uint4_fp8_dynamic", "uint4_wo_12"}  # registered on the page; the misspelling of "Errors"
            assert name in SCHEMES or name in MIXES or name in FAMILIES or name in added, (
                f"{page_name(page)} names {name}"
            )


def test_the_changelog_has_the_version() -> None:
    from quark.__version__ import __version__

    assert f"## {__version__}" in (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
