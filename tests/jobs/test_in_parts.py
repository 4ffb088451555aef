"""A float and a quantized model that are compared block by block: the figures are those of models in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import quark
from quark.errors import ConfigError
from quark.jobs.folders.compared import pairs
from quark.jobs.folders.compared.measure import compare_outputs
from quark.jobs.request import AS_STORED, Loading
from quark.torch.algorithms.block_loop import is_inside
from quark.torch.calibration import work_device
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.compared.layer_damage import LayerDamage
from quark.torch.flows.parted import PartedModel, parts_of
from quark.torch.layers import QuantLayer
from tests.commands.program import quark as program
from tests.models.denoisers import denoiser, step
from tests.models.families import family
from tests.models.model_folders import model_folder
from tests.pretended_gpu import PretendedGpu

IDS = [torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(length)) for length in (16, 16, 9)]
DENOISERS = ("sd3", "flux", "unet")
slow = pytest.mark.slow
CASES = [
    ("tied", ("int8_wo",)),
    *(
        pytest.param(kind, words, marks=slow)
        for kind, words in (
            ("gpt2", ("int8_wo",)),
            ("mixtral", ("int4_wo_32", "compressed-tensors")),
            ("gpt_oss", ("int8_wo",)),
            ("llama", ("uint4_wo_32", "awq")),
            ("qwen3", ("q8_0", "gguf")),
            ("t5", ("int8_wo",)),
            *((name, ("int8_wo",)) for name in DENOISERS),
        )
    ),
]


def made(kind: str, folder: Path) -> tuple[Path, list[Any]]:
    """A float model of a kind, and batches for it."""
    if kind in DENOISERS:
        denoiser(kind, torch.bfloat16).save_pretrained(folder)
        return folder, [step(kind, seed, torch.bfloat16) for seed in range(2)]
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
        return folder, [{"input_ids": x, "decoder_input_ids": x[:, :5]} for x in IDS]
    if kind == "qwen3":  # with a tokenizer, which a GGUF file holds
        return model_folder(kind, folder), IDS
    tied = {"tie_word_embeddings": True} if kind == "tied" else {}
    family("llama" if kind == "tied" else kind, **tied).to(torch.bfloat16).save_pretrained(folder)
    return folder, IDS


def quantized(model: Path, out: Path, scheme: str = "int8_wo", form: str = "quark") -> None:
    done = program("quantize", model, "-o", out, "--scheme", scheme, "--export-format", form)
    assert done.code == 0, done.err


def pair_of(
    model: Path, quantized: Path, stream: bool, loading: Loading = AS_STORED
) -> tuple[PartedModel, PartedModel]:
    after = quantized if quantized.suffix == ".gguf" else OpenedFolder(quantized)
    return pairs.open_pair(OpenedFolder(model), after, loading, stream)


def figures(pair: tuple[PartedModel, PartedModel], batches: Sequence[Any]) -> dict[str, Any]:
    layers = LayerDamage(pair[0].model, pair[1].model, draws=True)
    found = compare_outputs(*pair, batches, layers)
    assert layers.names and {*layers.damage} == {*layers.names}
    return {
        "perplexity": found.perplexity,
        "divergence": torch.cat(list(found.divergence) or [torch.zeros(1)]).tolist(),
        "outputs": {name: (astuple(each.comparison), each.agreed) for name, each in found.outputs.items()},
        "damage": {name: [None if math.isnan(x) else x for x in pair] for name, pair in layers.damage.items()},
        "channels": {name: each.values.tolist() for name, each in layers.channels.layers.items()},
        "drawn": [(each.title, each.counts.tolist(), each.clip) for each in layers.histograms],
    }


@pytest.mark.parametrize(("kind", "words"), CASES)
def test_block_by_block_gives_the_figures_of_models_in_memory(
    kind: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    folder, batches = made(kind, tmp_path / "float")
    out = tmp_path / ("out.gguf" if words[1:] == ("gguf",) else "out")
    quantized(folder, out, *words)
    whole = figures(pair_of(folder, out, stream=False), batches)
    assert whole["outputs"] and whole["damage"] and whole["drawn"] and whole["channels"]
    assert figures(pair_of(folder, out, stream=True), batches) == whole


def test_a_block_of_each_model_is_in_memory_at_a_time(tmp_path: Path) -> None:
    folder, batches = made("llama", tmp_path / "float")
    quantized(folder, tmp_path / "out")
    pair = pair_of(folder, tmp_path / "out", stream=True)
    blocks = pair[0].find_blocks(batches[0], ())
    seen = []
    for part in parts_of(pair, batches, blocks):
        seen.append(part.block)
        for each in pair:
            there = {name for name, x in each.model.named_parameters() if not x.is_meta}
            inside = {name for name in there if any(is_inside(name, block) for block in blocks)}
            assert all(part.holds(name) for name in inside) and bool(inside) == bool(part.block), (part.block, there)
        for index, batch in enumerate(batches):
            part.run(index, batch)
    assert seen == [*blocks, None] and len(blocks) > 1
    assert all(x.is_meta for each in pair for x in each.model.parameters())


def test_what_the_last_block_gives_has_come_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches wait on the host of a GPU, and what comes after the blocks runs there."""
    # In float32: of bfloat16, a processor without its products sums those of the pretended device in another order.
    folder, batches = tmp_path / "float", IDS
    family("llama").save_pretrained(folder)
    quantized(folder, tmp_path / "out")

    def outputs(loading: Loading) -> list[torch.Tensor]:
        pair = pair_of(folder, tmp_path / "out", True, loading)
        parts = parts_of(pair, batches, pair[0].find_blocks(batches[0], ()))
        return [each.logits for part in parts for i, x in enumerate(batches) for each in part.run(i, x) if each]

    expected = outputs(AS_STORED)
    monkeypatch.setattr(work_device, "ON_DEVICE", 0)
    with PretendedGpu():
        found = outputs(Loading(device="cuda"))
    assert len(found) == 2 * len(batches) and all(map(torch.equal, found, expected))


def test_codes_of_a_block_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, batches = made("llama", tmp_path / "float")
    quantized(folder, tmp_path / "out")
    pair, decoded = pair_of(folder, tmp_path / "out", stream=True), list[str]()
    layers = {name: m for name, m in pair[1].model.named_modules() if isinstance(m, QuantLayer)}
    for name, layer in layers.items():
        layout: Any = layer.weight_quantizer.layout  # type: ignore[union-attr]
        load = layout.load
        monkeypatch.setattr(layout, "load", lambda *a, n=name, load=load: (decoded.append(n), load(*a))[1])
    blocks = pair[0].find_blocks(batches[0], ())
    decoded.clear()
    for part in parts_of(pair, batches, blocks):
        before = len(decoded)
        for index, batch in enumerate(batches):
            part.run(index, batch)
        if part.block:
            assert sorted(decoded[before:]) == sorted(filter(part.holds, layers))


@pytest.mark.parametrize(("asked", "free", "streams"), [(None, 1e9, False), (None, 1, True), (False, 1, False)])
def test_memory_decides_where_nobody_says_it(
    asked: bool | None, free: float, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = OpenedFolder(made("llama", tmp_path / "float")[0])
    monkeypatch.setattr(pairs, "fits_memory", lambda size: size < free)
    assert pairs.reads_in_parts(folder, AS_STORED, asked) is streams
    assert not pairs.reads_in_parts(folder, Loading(dtype="float32"), None)
    with pytest.raises(ConfigError, match="--dtype float32"):
        pairs.reads_in_parts(folder, Loading(dtype="float32"), True)


@pytest.mark.slow
def test_the_commands_say_the_same_of_streamed_models(tmp_path: Path) -> None:
    folder = model_folder("qwen3", tmp_path / "float")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    quantized(folder, tmp_path / "out")
    both = [
        quark.compare(folder, "int8_wo,mxfp4", calib=text, windows=2, length=16, stream=stream)
        for stream in (False, True)
    ]
    assert both[0] == both[1] and len(both[0].schemes) == 2
    page = tmp_path / "page.html"
    words = "--data", text, "--windows", 2, "--length", 16
    done = program("evaluate", folder, tmp_path / "out", *words, "--stream", "--report", page)
    assert done.code == 0 and "latency" not in done.out.replace("no latency", ""), done.err
    assert "Ranges of the worst layers" in page.read_text()
