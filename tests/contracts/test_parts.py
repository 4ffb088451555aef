"""Layers wider than every part in which the code takes them: what is solved is the same as at once.

The parts are those of `tests.models.parts`. First the algorithms by themselves, on a model in memory; then what
commands write of a folder, over schemes, formats, flows and algorithms.
"""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.core.schemes import SCHEMES
from quark.gguf.mixes import MIXES
from quark.torch import ModelQuantizer, gguf_config, import_model_from_gguf, import_model_from_safetensors
from quark.torch.algorithms import ALGORITHMS
from quark.torch.config.algo_configs import (
    AlgoConfig,
    GPTQConfig,
)
from quark.torch.formats import FORMATS
from tests.commands.program import quark
from tests.contracts.test_torch_algorithms import IN_OTHER_ORDER, SEEN, logits, quantized, row_of, solved
from tests.models.families import family
from tests.models.parts import make_parts_small
from tests.models.torch_zoo import LANGUAGE_MODEL, tiny_llama


@pytest.mark.parametrize(
    "kind",
    [kind if kind is GPTQConfig else pytest.param(kind, marks=pytest.mark.slow) for kind in ALGORITHMS],
    ids=lambda kind: kind.__name__.removesuffix("Config"),
)
def test_an_algorithm_gives_what_it_gives_at_once(kind: type[AlgoConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    row, expected = row_of(kind), solved(kind)
    config = row.config if isinstance(row.config, AlgoConfig) else row.config()
    make_parts_small(monkeypatch)
    found = quantized(row.scheme, config)
    if kind in IN_OTHER_ORDER:
        assert row.loss(found) == pytest.approx(row.loss(expected), rel=IN_OTHER_ORDER[kind])
    else:
        states = expected.state_dict(), found.state_dict()
        assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


BLOCK_TYPES = ("q2_k", "q4_k_m", "iq4_xs", "q8_0")


def of_block_types(name: str, algorithm: str) -> Any:
    """A model whose rows are whole blocks, 256 wide, solved under a mix of GGUF."""
    model = tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    config = gguf_config(model, name, [algorithm])
    return ModelQuantizer(config).quantize_model(model, SEEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("algorithm", ["gptq", "qronos"])
def test_block_types_give_what_they_give_at_once(name: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = of_block_types(name, algorithm)
    make_parts_small(monkeypatch)
    found = of_block_types(name, algorithm)
    wanted, left = logits(tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=1), SEEN), []
    for model in (expected, found):
        left.append(float((logits(model, SEEN) - wanted).square().mean()))
    # The search among block types takes the other one of two near scales where sums differ in their last digits.
    assert left[1] == pytest.approx(left[0], rel=0.1)


# What a command writes of a folder. ---------------------------------------------------------------------------------

SIDES = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}
"""Family -> what it has beside SIDES: one whose table is its head, and experts."""
SOLVED = ("gptq", "awq", "qronos", "importance")
"""Algorithms that a folder is solved by here; the one-model contract above has all of them."""
FLOWS = {"memory": ("--no-stream",), "streamed": ("--stream",), "files": ()}
EVERY = [
    *((form, scheme) for form in FORMATS for scheme in SCHEMES if FORMATS[form].refusal(SCHEMES[scheme]) is None),
    *(("gguf", mix) for mix in MIXES),
]
EVERYDAY = [
    ("llama", "awq", "uint4_wo_32", "files", ""),
    ("mixtral", "gguf", "q4_0", "streamed", ""),
]


def cases() -> Iterator[Any]:
    """Every model, format, scheme, flow and algorithm that go together."""
    for (form, scheme), name, flow in itertools.product(EVERY, MODELS, FLOWS):
        needs_data = form != "gguf" and SCHEMES[scheme].needs_data
        rounds = form == "gguf" or ((weight := SCHEMES[scheme].weight) is not None and not weight.is_cast)
        for algorithm in ("", *(SOLVED if flow != "files" and rounds else ())):
            if flow == "files" and needs_data:
                continue
            case = name, form, scheme, flow, algorithm
            yield pytest.param(
                *case, marks=() if case in EVERYDAY else pytest.mark.slow, id=" ".join(filter(None, case))
            )


@cache
def float_folder(name: str, in_blocks: bool) -> Path:
    """A folder in bfloat16 with its tokenizer, and the data that belong to it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Rows of GGUF files are whole blocks, and they hold the tokenizer.
    sides = SIDES | ({"vocab_size": 2048, "hidden_size": 256} if in_blocks else {})
    family(name, **sides, **MODELS[name]).to(torch.bfloat16).save_pretrained(folder / "float")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(LANGUAGE_MODEL / file, folder / "float" / file)
    # More tokens than channels: with fewer, one code that another order of sums gives costs a tenth of the loss.
    np.savez(folder / "data.npz", input_ids=np.random.default_rng(0).integers(3, 300, (20, 32)))
    return folder


def written(name: str, form: str, output: Path, options: Sequence[object]) -> dict[str, bytes] | str:
    """What a command writes of a model, by the names of files, or what it says."""
    output.mkdir()
    out = output / ("out.gguf" if form == "gguf" else "out")
    done = quark("quantize", float_folder(name, form == "gguf") / "float", "-o", out, "--export-format", form, *options)
    if done.code != 0:
        return done.err
    return {file.name: file.read_bytes() for file in ([out] if form == "gguf" else sorted(out.iterdir()))}


def lost_by(name: str, form: str, output: Path) -> float:
    """Mean square error of the logits of what was written."""
    folder = float_folder(name, form == "gguf")
    with np.load(folder / "data.npz") as data:
        batches = [torch.from_numpy(data["input_ids"])]
    model = AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.float32)
    expected = logits(model, batches)
    read = import_model_from_gguf if form == "gguf" else import_model_from_safetensors
    return float((logits(read(model, output), batches) - expected).square().mean())


@pytest.mark.parametrize(("name", "form", "scheme", "flow", "algorithm"), [*cases()])
def test_a_command_writes_what_it_writes_at_once(
    name: str, form: str, scheme: str, flow: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_data = algorithm or (form != "gguf" and SCHEMES[scheme].needs_data)
    data = ("--calib", float_folder(name, form == "gguf") / "data.npz") if needs_data else ()
    options = ("--scheme", scheme, *FLOWS[flow], *data, *(("--algorithm", algorithm) if algorithm else ()))
    expected = written(name, form, tmp_path / "once", options)
    make_parts_small(monkeypatch)
    found = written(name, form, tmp_path / "parts", options)
    assert type(found) is type(expected), found if isinstance(found, str) else expected
    if algorithm and found != expected:
        file = "out.gguf" if form == "gguf" else "out"
        lost = [lost_by(name, form, tmp_path / part / file) for part in ("once", "parts")]
        assert lost[1] <= 1.1 * lost[0]  # other sums, other codes: no worse
    else:
        assert found == expected
