"""Steps of a pipeline in a folder: which are kept, that they are what the denoiser read, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.errors import CalibrationError, ConfigError, OutputExistsError, StructureError
from quark.one_call import quantize
from quark.torch import record_steps, stored_batches
from quark.torch.model.calibration_data.stored_batches import read_batch, write_batch


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(8, 8)
        self.seen: list[tuple[float, torch.Tensor]] = []

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, cond: dict[str, Any] | None = None, return_dict: bool = True
    ) -> Any:
        self.seen.append((float(timestep), sample))
        out = self.proj(sample) + (0 if cond is None else cond["text"] * cond["size"][0])
        return {"sample": out} if return_dict else (out,)


class Pipeline:
    """Ten steps, with the prompt and without it in two calls."""

    def __init__(self) -> None:
        self.unet, self.vae = Denoiser(), nn.Linear(2, 2)

    def __call__(self, prompt: list[str], generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(1, 4, 8, generator=generator)
        for step in range(10):
            time = torch.tensor(900.0 - 100 * step)
            text = {"text": torch.full((8,), float(len(prompt[0])), dtype=torch.bfloat16), "size": (2.0, 1)}
            with_text = self.unet(x, timestep=time, cond=text, return_dict=False)[0]
            x = x - 0.1 * (with_text + scale * self.unet(x, time, return_dict=False)[0])
        return x


def test_a_few_steps_of_each_prompt_are_kept_and_together_they_reach_the_whole_schedule(tmp_path: Path) -> None:
    pipeline = Pipeline()
    batches = record_steps(pipeline, ["a", "bb", "ccc"], tmp_path / "steps", steps=2, seed=5)
    times = [float(batch["timestep"]) for batch in batches]
    # Steps floor((i + o) 10 / 2) of offsets 0.5, 0.118, 0.736, and both calls of each.
    assert times == [t for step in (2, 7, 0, 5, 3, 8) for t in [900.0 - 100 * step] * 2]
    assert sorted(file.name for file in (tmp_path / "steps").iterdir()) == [f"{i:06}.npz" for i in range(12)]
    read = [sample for number, step in ((0, 2), (0, 7), (1, 0)) for sample in _read(pipeline, number, step)]
    for batch, sample in zip(batches, read, strict=False):
        assert torch.equal(batch["sample"], sample) and "return_dict" not in batch
    first, second = batches[0], batches[1]
    assert first["cond"]["size"] == (2.0, 1) and first["cond"]["text"].dtype == torch.bfloat16
    assert first["cond"]["text"].tolist() == [1.0] * 8 and "cond" not in second
    assert not pipeline.unet._forward_pre_hooks


def _read(pipeline: Pipeline, number: int, step: int) -> list[torch.Tensor]:
    """What the denoiser read in both calls of a step of a run of 20 calls."""
    return [sample for _, sample in pipeline.unet.seen[20 * number + 2 * step : 20 * number + 2 * step + 2]]


def test_a_module_is_calibrated_from_the_folder(tmp_path: Path) -> None:
    pipeline = Pipeline()
    batches = record_steps(pipeline, [{"prompt": ["a"], "scale": 2.0}], tmp_path / "steps", steps=100)
    assert len(batches) == 20
    largest = max(float(batch["sample"].abs().max()) for batch in batches)
    model = quantize(pipeline.unet, "int8", data=tmp_path / "steps", algorithm=())
    assert float(model.proj.quantizer("input").scale) == pytest.approx(largest / 127, rel=0.02)
    model = quantize(Denoiser(), "int8", data=tmp_path / "steps", samples=1, algorithm=())
    first = float(batches[0]["sample"].abs().max())
    assert float(model.proj.quantizer("input").scale) == pytest.approx(first / 127, rel=0.02) and first < largest


def test_a_file_of_rows_is_a_sample_for_each_row_and_any_other_is_one_batch(tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    np.savez(file, sample=np.ones((3, 4, 8), np.float32), timestep=np.arange(3.0))
    rows = stored_batches(file, Denoiser)
    assert [(tuple(row["sample"].shape), float(row["timestep"])) for row in rows] == [((1, 4, 8), i) for i in range(3)]
    write_batch(file, {"sample": torch.ones(3, 4, 8), "timestep": torch.tensor(7.0)})
    assert [tuple(batch["sample"].shape) for batch in stored_batches(file)] == [(3, 4, 8)]
    assert len(stored_batches(file, limit=9)) == 1


def test_of_more_batches_than_the_limit_some_are_taken_that_are_spread_evenly(tmp_path: Path) -> None:
    for index in range(7):
        write_batch(tmp_path / f"{index}.npz", {"timestep": torch.tensor(index)})
    taken = stored_batches(tmp_path, limit=3)
    assert [int(batch["timestep"]) for batch in taken] == [0, 2, 4] and int(taken[1:][0]["timestep"]) == 2


@pytest.mark.parametrize(
    "value", [None, True, 3, "text", [1, (2, [3.5])], [[(1, 4, 4)]], {"a": {"b": [torch.arange(3)]}}, {"array": "a"}]
)
def test_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    write_batch(tmp_path / "one.npz", {"x": torch.ones(()), "value": value})
    found = read_batch(tmp_path / "one.npz")["value"]
    assert repr(found) == repr(value) and type(found) is type(value)


def test_what_is_no_batch_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    pipeline, place = Pipeline(), tmp_path / "steps"
    with pytest.raises(CalibrationError, match="does not call this Denoiser"):
        record_steps(pipeline, ["a"], place, denoiser=Denoiser())
    with pytest.raises(StructureError, match="'inputs'"):
        record_steps(pipeline, ["a"], place, denoiser=nn.DataParallel(Denoiser()))
    with pytest.raises(ConfigError, match="list of prompts"):
        record_steps(pipeline, "a cat", place)
    with pytest.raises(ConfigError, match=r"no denoiser among its modules \(none\).*denoiser=pipeline.NAME"):
        record_steps(object.__new__(Pipeline), ["a"], place)
    pipeline.unet_2 = Denoiser()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"several denoisers \(unet, unet_2\)"):
        record_steps(pipeline, ["a"], place)
    assert not [*tmp_path.iterdir()]
    record_steps(pipeline, ["a"], place, denoiser=pipeline.unet, steps=1)
    with pytest.raises(OutputExistsError):
        record_steps(pipeline, ["a"], place, denoiser=pipeline.unet)
    with pytest.raises(CalibrationError, match="Denoiser takes no 'hidden_states'"):
        write_batch(tmp_path / "x.npz", {"hidden_states": torch.ones(2)})
        stored_batches(tmp_path / "x.npz", Denoiser)
    (tmp_path / "x.npz").write_bytes(b"PK no archive")
    with pytest.raises(CalibrationError, match="cannot be read as a batch"):
        stored_batches(tmp_path / "x.npz")
    (tmp_path / "x.npz").unlink()
    with pytest.raises(CalibrationError, match="holds no .npz"):
        stored_batches(tmp_path)
    with pytest.raises(StructureError, match="x is a Linear"):
        write_batch(tmp_path / "x.npz", {"x": nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        *((f'{{"x": {{"array": "x", "dtype": "{name}"}}}}', f"{name!r} is no type of floats")
          for name in ("load", "hub", "Tensor", "qint8", "strided", "int8")),
        ('{"x": {"array": "x", "dtype": 3}}', "3 is no type of floats"),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"x": {"array": "y"}}', "KeyError: 'y'"),
    ],
)  # fmt: skip
def test_a_layout_names_types_of_floats_and_nothing_else(tmp_path: Path, layout: str, said: str) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones(2, np.float32), batch_layout=np.array(layout))
    with pytest.raises(CalibrationError) as refused:
        read_batch(tmp_path / "x.npz")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_pickled_arrays_and_pipes_are_not_opened(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (tmp_path / "run").touch, ()

    np.savez(tmp_path / "x.npz", x=np.array([Code()], dtype=object))
    os.mkfifo(tmp_path / "y.npz")
    for name in ("x.npz", "y.npz"):
        with pytest.raises(CalibrationError, match="holds Python objects|is not a file"):
            read_batch(tmp_path / name)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_unsigned_integers_are_read_as_int64(tmp_path: Path, kind: Any) -> None:
    np.savez(tmp_path / "x.npz", x=np.array([0, 65535], kind))
    assert torch.equal(read_batch(tmp_path / "x.npz")["x"], torch.tensor([0, 65535]))
    np.savez(tmp_path / "x.npz", x=np.array([2**63], np.uint64))
    with pytest.raises(CalibrationError, match="more than int64 holds"):
        read_batch(tmp_path / "x.npz")


def test_what_text_encoders_read_of_the_prompts_is_kept_once(tmp_path: Path) -> None:
    """In folders of their names, as `stored_batches` and a job of that component take them."""
    from transformers import CLIPTextConfig, CLIPTextModel

    pipeline = Pipeline()
    config = CLIPTextConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=99
    )
    pipeline.text_encoder = encoder = CLIPTextModel(config)  # type: ignore[attr-defined]
    run = Pipeline.__call__
    ids = {"a cat": torch.tensor([[1, 2, 3]]), "a dog": torch.tensor([[1, 4, 3]]), "": torch.tensor([[1, 3, 3]])}

    def encodes(self: Any, prompt: list[str], **arguments: Any) -> Any:
        for text in (*prompt, ""):
            encoder(ids[text], output_hidden_states=True)
        return run(self, prompt=prompt, **arguments)

    kind = type("Encoding", (Pipeline,), {"__call__": encodes})
    pipeline.__class__ = kind
    record_steps(pipeline, ["a cat", "a dog", "a cat"], tmp_path / "steps", denoiser=pipeline.unet)
    kept = stored_batches(tmp_path / "steps" / "text_encoder", CLIPTextModel)
    assert [batch["input_ids"].tolist() for batch in kept] == [ids[text].tolist() for text in ("a cat", "", "a dog")]
    assert all(batch.keys() == {"input_ids"} for batch in kept)
    assert all("sample" in batch for batch in stored_batches(tmp_path / "steps"))
