"""Sensitivities against measured divergences, both ways to load a model, a killed run, and what budgets give."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from quark.core.quantize import fake_quantize
from quark.core.schemes import SCHEMES
from quark.core.spec import block_spec
from quark.errors import CalibrationError, ConfigError, FormatError, NotSupportedError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.bit_budget.measure import measure_sensitivity
from quark.torch.bit_budget.sensitivity import AskedBudget, SensitivityTable
from quark.torch.calibration.calibrate import tensor_qparams
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.flows.from_disk import stream
from tests.models.architectures import build
from tests.models.denoisers import denoiser, step
from tests.models.torch_zoo import LANGUAGE_MODEL, TEXT, tiny_llama, token_batches

pytestmark = pytest.mark.slow

CANDIDATES = ("int3_wo_128", "uint4_wo_64", "int8_wo")


@pytest.fixture(scope="module")
def table() -> SensitivityTable:
    return measure_sensitivity(tiny_llama(), token_batches(), CANDIDATES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(place)
    return place


def windows(name: str, count: int) -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(LANGUAGE_MODEL)((TEXT / f"{name}.txt").read_text(), verbose=False).input_ids
    return list(torch.tensor(ids[: count * 256]).view(count, 1, 256))


def divergence(model: Any, other: Any, batches: list[torch.Tensor]) -> float:
    """Mean KL of two models' next tokens, by torch."""
    with torch.no_grad():
        pairs = [[m(batch).logits.log_softmax(-1) for m in (other, model)] for batch in batches]
    return sum(float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")) / p[..., 0].numel()
               for q, p in pairs) / len(pairs)  # fmt: skip


def ranks(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).argsort().argsort().double()


def test_it_ranks_layers_as_measured_one_at_a_time() -> None:
    """Spearman's correlation with the divergence of the model with that group alone quantized, on the same text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()
    data = windows("calibration", 4)
    table = measure_sensitivity(model, data, ("int2_wo_64", "int3_wo_128"))
    expected, found = [], []
    for group in table.groups:
        other = copy.deepcopy(model)
        spec = SCHEMES["int3_wo_128"].weight
        assert spec is not None
        for name in group.layers:
            weight = other.get_submodule(name).weight.data
            weight.copy_(fake_quantize(weight, tensor_qparams(weight, spec), spec))
        expected.append(divergence(model, other, data))
        found.append(group.losses["int3_wo_128"])
    both = torch.stack([ranks(expected), ranks(found)])
    assert float(torch.corrcoef(both)[0, 1]) > 0.9
    # Sums of the losses are divergences too, not only their order.
    assert sum(found) == pytest.approx(sum(expected), rel=0.5)


def test_a_budget_loses_less_than_one_scheme_of_its_size() -> None:
    """On text that it did not read, from the candidates of the format: at most 0.7 of each scheme's divergence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LANGUAGE_MODEL, dtype=torch.float32).eval()
    table = measure_sensitivity(model, windows("calibration", 8), alike=False)
    for scheme in ("int3_wo_128", "uint4_wo_128"):
        uniform = table.uniform(scheme)
        assert uniform is not None
        choice = table.choose(size=uniform.size)
        base = LLMTemplate.get("auto").get_config(scheme)
        lost = []
        for config in (base, table.config(choice, base)):
            quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model))
            lost.append(divergence(model, quantized, windows("heldout", 8)))
        assert choice.size <= uniform.size
        assert lost[1] <= 0.7 * lost[0], scheme


def test_layers_that_read_one_tensor_are_alike(table: SensitivityTable) -> None:
    leaves = [tuple(name.rpartition(".")[2] for name in group.layers) for group in table.groups]
    block = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert leaves == block * 2


def test_layers_apart_lose_less_within_a_budget(table: SensitivityTable) -> None:
    """What layers that are alike weigh and lose together is the sum of what each does apart."""
    apart = measure_sensitivity(tiny_llama(), token_batches(), CANDIDATES, alike=False)
    assert all(len(group.layers) == 1 for group in apart.groups)
    own = {group.layers[0]: group for group in apart.groups}
    for group in table.groups:
        for name in CANDIDATES:
            parts = [own[layer] for layer in group.layers]
            assert group.sizes[name] == sum(part.sizes[name] for part in parts)
            assert group.losses[name] == pytest.approx(sum(part.losses[name] for part in parts))
    choice = apart.choose(bits=5)
    assert choice.loss < table.choose(bits=5).loss
    blocks = [[choice.schemes[f"model.layers.{i}.self_attn.{leaf}_proj"] for leaf in "qkv"] for i in range(2)]
    assert any(len(set(schemes)) > 1 for schemes in blocks)


@pytest.mark.parametrize(("alike", "fused"), [(True, True), (["vLLM"], True), (["SGLang"], False)])
def test_layers_are_alike_that_the_server_in_question_makes_one_of(alike: Any, fused: bool) -> None:
    """w1 and w3 of LFM2: vLLM has one matrix of both, SGLang two."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    model: Any = Lfm2ForCausalLM(Lfm2Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"],
    )).eval()  # fmt: skip
    table = measure_sensitivity(model, token_batches(vocabulary=32), ("int8_wo", "uint4_wo_per_channel"), alike=alike)
    leaves = {tuple(name.rpartition(".")[2] for name in group.layers) for group in table.groups}
    assert (("w1", "w3") in leaves) is fused and (("w1",) in leaves) is not fused
    assert ("q_proj", "k_proj", "v_proj") in leaves
    with pytest.raises(ConfigError, match="not known which layers 'llama.cpp' fuses"):
        measure_sensitivity(model, token_batches(vocabulary=32), alike=["llama.cpp"])


@pytest.mark.parametrize("alike", [True, False])
def test_experts_of_a_mixture_are_alike_under_one_pattern(alike: bool) -> None:
    model = build("mixtral")
    data = token_batches(vocabulary=32)
    table = measure_sensitivity(model, data, ("int8_wo", "uint4_wo_per_channel"), alike=alike)
    mixtures = [group for group in table.groups if any("experts" in name for name in group.layers)]
    assert mixtures and all(all("experts" in name for name in group.layers) for group in mixtures)
    choice = table.choose(bits=6)
    config = table.config(choice, LLMTemplate.get("auto").get_config("int8_wo"))
    assert sum("experts" in pattern for pattern in config.layer_quant_config) <= len(mixtures)
    quantized: Any = ModelQuantizer(config).quantize_model(build("mixtral"))
    for name, spec in quantized.quant_plan.layers.items():
        assert str(spec) == str(SCHEMES[choice.schemes[name]])


def test_a_folder_gives_what_the_model_in_memory_gives(table: SensitivityTable, folder: Path) -> None:
    streamed = measure_sensitivity(folder, token_batches(), CANDIDATES)
    assert streamed.rest == table.rest
    for one, other in zip(streamed.groups, table.groups, strict=True):
        assert (one.layers, one.sizes) == (other.layers, other.sizes)
        assert one.losses == pytest.approx(other.losses, rel=1e-4)  # float32 sums in another order


@pytest.mark.parametrize("budget", [{"bits": 1.0}, {"bits": 12.0}, {"size": 1000}, {"size": 10**9}])
@pytest.mark.parametrize("form", ["quark", "gguf"])
def test_a_budget_that_no_choice_meets_is_refused_before_the_data_run(
    monkeypatch: pytest.MonkeyPatch, form: str, budget: dict[str, Any]
) -> None:
    """With the range that the table gives, where the layers that must be alike have the same candidates."""
    names = CANDIDATES if form == "quark" else ("q4_0", "q8_0")

    def measured(asked: AskedBudget | None) -> SensitivityTable:
        return measure_sensitivity(tiny_llama(), token_batches(), names, export_format=form, budget=asked)

    with pytest.raises(ConfigError) as late:
        measured(None).choose(**budget)
    monkeypatch.setattr("quark.torch.bit_budget.measure.Sweep", None)
    with pytest.raises(ConfigError) as early:
        measured(AskedBudget(budget.get("bits"), budget.get("size")))
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("from_disk", [True, False])
def test_what_one_pass_leaves_lies_where_the_model_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_disk: bool
) -> None:
    """The inputs of all blocks of a model that is larger than memory may be larger yet; nothing of them stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keep, in_memory, on_disk = PassStore.keep, set[str](), set[str]()

    def note(store: PassStore, name: str, tensors: Any) -> None:
        keep(store, name, tensors)
        in_memory.update(store._tensors)
        on_disk.update(file.stem for file in tmp_path.rglob("*.safetensors"))

    monkeypatch.setattr(PassStore, "keep", note)
    measure_sensitivity(folder if from_disk else tiny_llama(), token_batches(), CANDIDATES)
    there, elsewhere = (on_disk, in_memory) if from_disk else (in_memory, on_disk)
    assert {"inputs-0", "inputs-1", "inputs-2", "scores-1"} <= there
    assert not elsewhere
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", ["inputs-1", "tail", "scores-1", "block-1"])
def test_a_killed_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    whole = measure_sensitivity(folder, token_batches(), CANDIDATES)
    keep, keep_result = PassStore.keep, PassStore.keep_result
    done: list[str] = []

    def dying(real: Callable[..., None]) -> Callable[..., None]:
        def keep_and_die(store: PassStore, name: str, value: Any) -> None:
            real(store, name, value)
            done.append(name)
            if name == kept:
                raise KeyboardInterrupt

        return keep_and_die

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PassStore, "keep", dying(keep))
        patch.setattr(PassStore, "keep_result", dying(keep_result))
        measure_sensitivity(folder, token_batches(), CANDIDATES, work=tmp_path / "work")
    before = set(done) - {"settings"}
    done.clear()

    def noting(real: Callable[..., None]) -> Callable[..., None]:
        def keep_and_note(store: PassStore, name: str, value: Any) -> None:
            real(store, name, value)
            done.append(name)

        return keep_and_note

    with monkeypatch.context() as patch:
        patch.setattr(PassStore, "keep", noting(keep))
        patch.setattr(PassStore, "keep_result", noting(keep_result))
        resumed = measure_sensitivity(folder, token_batches(), CANDIDATES, work=tmp_path / "work")
    assert resumed == whole
    assert "block-1" not in before or "block-1" not in done
    assert "inputs-1" not in done  # the first block was run already
    assert not (tmp_path / "work").exists()


def test_a_run_of_other_data_does_not_go_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("quark.torch.bit_budget.sweep.Sweep._tail", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        measure_sensitivity(folder, token_batches(), CANDIDATES, work=tmp_path / "work")
    with pytest.raises(ConfigError, match="calibration data"):
        measure_sensitivity(folder, token_batches(2), CANDIDATES, work=tmp_path / "work")


@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
def test_the_size_is_that_of_the_files(folder: Path, tmp_path: Path, form: str) -> None:
    model = tiny_llama()
    table = measure_sensitivity(model, token_batches(), ("int3_wo_128", "int4_wo_64", "int8_wo"), export_format=form)
    choice = table.choose(bits=5)
    config = table.config(choice, LLMTemplate.get("auto").get_config("int8_wo"))
    assert len(set(choice.schemes.values())) > 1
    quantizer = ModelQuantizer(config)
    export_safetensors(quantizer.freeze(quantizer.quantize_model(model)), tmp_path / "out", form)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 - no mapping
    assert sum(stored.values()) == choice.size
    if form == "quark":
        stream(config, OpenedFolder(folder), tmp_path / "streamed")
        assert (tmp_path / "streamed" / "model.safetensors").read_bytes() == (
            tmp_path / "out" / "model.safetensors"
        ).read_bytes()


def test_more_bits_lose_less_and_fit(table: SensitivityTable) -> None:
    choices = [table.choose(bits=bits) for bits in (3.4, 3.7, 4, 5, 6, 8)]
    assert [choice.bits <= bits for choice, bits in zip(choices, (3.4, 3.7, 4, 5, 6, 8), strict=True)] == [True] * 6
    losses = [choice.loss for choice in choices]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_a_table_is_read_as_it_was_written(table: SensitivityTable, tmp_path: Path) -> None:
    table.save(tmp_path / "table.json")
    assert SensitivityTable.load(tmp_path / "table.json") == table


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "other"}', '{"kind": "quark sensitivity", "groups": []}'])
def test_other_files_are_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(FormatError, match=r"table\.json is no table of sensitivities"):
        SensitivityTable.load(tmp_path / "table.json")


def test_a_table_that_lacks_a_group_is_refused_and_one_without_a_number_of_layers_is_read(
    table: SensitivityTable, tmp_path: Path
) -> None:
    table.save(tmp_path / "table.json")
    stored = json.loads((tmp_path / "table.json").read_text())
    lacking = {**stored, "groups": stored["groups"][1:]}
    (tmp_path / "table.json").write_text(json.dumps(lacking))
    with pytest.raises(FormatError, match="no table of sensitivities: its groups have .* layers of"):
        SensitivityTable.load(tmp_path / "table.json")
    del stored["number_of_layers"]  # as quark 1.0 wrote it
    (tmp_path / "table.json").write_text(json.dumps(stored))
    assert SensitivityTable.load(tmp_path / "table.json") == table


@pytest.mark.parametrize("loss", [-1.0, 1e308])
def test_a_loss_that_is_no_number_is_refused(table: SensitivityTable, tmp_path: Path, loss: float) -> None:
    table.save(tmp_path / "table.json")
    stored = json.loads((tmp_path / "table.json").read_text())
    stored["groups"][0]["losses"]["int8_wo"] = loss
    (tmp_path / "table.json").write_text(json.dumps(stored))
    with pytest.raises(FormatError, match="negative"):
        SensitivityTable.load(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"bits": 2}, "2 bits is below the smallest choice. Possible with these candidates: 3.312 bits to 8.278"),
        ({"bits": 9}, "9 bits is above the largest choice"),
        ({"size": 10}, "0.00 MB is below the smallest choice"),
        ({}, "one of both"),
        ({"bits": 4, "size": 9}, "one of both"),
        ({"bits": 4, "candidates": ("int8",)}, "'int8' is not in this table. Did you mean"),
    ],
)
def test_budgets_that_cannot_be_met_say_what_can(table: SensitivityTable, budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        table.choose(**budget)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"candidates": ("int5_wo", "int8_wo")}, ConfigError, "Unknown scheme 'int5_wo'"),
        ({"candidates": ("int8_wo",)}, ConfigError, "two candidates"),
        ({"candidates": ("int8", "int8_wo")}, ConfigError, "static activation scales"),
        ({"data": []}, CalibrationError, "empty"),
        ({"export_format": "awq"}, NotSupportedError, "not counted in the format awq"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    options = {"data": token_batches(), "candidates": CANDIDATES} | given
    with pytest.raises(kind, match=message):
        measure_sensitivity(tiny_llama(), **options)


def test_a_model_in_float16_is_refused() -> None:
    with pytest.raises(ConfigError, match="is float16"):
        measure_sensitivity(tiny_llama(dtype=torch.float16), token_batches(), CANDIDATES)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_llama()
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    measure_sensitivity(model, token_batches(), CANDIDATES)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name][0])
        assert (tensor.requires_grad, tensor.grad) == (before[name][1], None)


@pytest.mark.parametrize(
    ("key", "value"), [("weights", 0), ("weights", 1e400), ("weights", 2.5), ("sizes", {"int8_wo": -1}), ("sizes", {})]
)
def test_numbers_of_nothing_are_no_table(table: SensitivityTable, tmp_path: Path, key: str, value: Any) -> None:
    table.save(tmp_path / "table.json")
    stored = json.loads((tmp_path / "table.json").read_text())
    stored["groups"][0][key] = value
    if key == "sizes":
        stored["groups"][0]["losses"] = dict.fromkeys(value, 0.0)
    (tmp_path / "table.json").write_text(json.dumps(stored))
    with pytest.raises(FormatError, match="no table of sensitivities"):
        SensitivityTable.load(tmp_path / "table.json")


def test_a_file_is_read_only_where_it_ends(tmp_path: Path) -> None:
    """A pipe would wait for ever, and deep nesting is no table."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="pipe"):
        SensitivityTable.load(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(FormatError, match="no table of sensitivities"):
        SensitivityTable.load(tmp_path / "deep")


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_measured_and_a_tied_head_counts_once(tied: bool) -> None:
    """The sum for the embeddings is their Fisher form, taken from the gradient of each row by autograd."""
    model = tiny_llama(tie_word_embeddings=tied)
    data = token_batches()
    table = measure_sensitivity(model, data, ("q4_0", "q8_0"), export_format="gguf")
    group = next(group for group in table.groups if "model.embed_tokens" in group.layers)
    weight = model.model.embed_tokens.weight
    assert group.layers == (("lm_head", "model.embed_tokens") if tied else ("model.embed_tokens",))
    assert group.weights == weight.numel() and group.sizes["q8_0"] == weight.numel() // 32 * 34
    if tied:
        return
    spec = block_spec("q4_0")
    error = (fake_quantize(weight.detach(), tensor_qparams(weight.detach(), spec), spec) - weight.detach()).square()
    counts, scores, total = torch.zeros(len(weight)), torch.zeros(weight.shape[1]), 0
    for index, batch in enumerate(data):
        ids = batch["input_ids"] if isinstance(batch, dict) else batch
        embedded = weight.detach()[ids].requires_grad_()
        rows = model(inputs_embeds=embedded).logits.log_softmax(-1).flatten(0, -2)
        labels = torch.multinomial(rows.detach().exp(), 1, generator=torch.Generator().manual_seed(index))
        rows.gather(1, labels).sum().backward()
        assert embedded.grad is not None
        scores += embedded.grad.flatten(0, -2).square().sum(0)
        counts += torch.bincount(ids.flatten(), minlength=len(weight))
        total += ids.numel()
    expected = float(counts @ error @ scores) / (2 * total * total)
    assert group.losses["q4_0"] == pytest.approx(expected, rel=1e-3)


@torch.no_grad()
def test_a_denoiser_of_two_streams_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    model = denoiser("sd3")
    with caplog.at_level("INFO"):
        table = measure_sensitivity(model, [step("sd3", seed) for seed in (1, 2)], ["uint4_wo_32", "int8_wo"])
    losses = {name: group.losses for group in table.groups for name in group.layers}
    # The text of the last block ends there: its queries are read by nothing. Modulations read the timestep alone.
    assert [line for line in caplog.messages if "nothing reads" in line] == [
        "transformer_blocks.1.attn.add_q_proj: nothing reads what it gives; it gets the smallest candidate."
    ]
    assert all(loss["uint4_wo_32"] > 4 * loss["int8_wo"] > 0 for loss in losses.values())
    assert {f"transformer_blocks.{i}.norm1.linear" for i in (0, 1)} < {*losses}
    assert all(name.startswith("transformer_blocks.") for name in losses), "what is outside the blocks stays in float"
