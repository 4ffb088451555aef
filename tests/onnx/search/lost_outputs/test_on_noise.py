"""Without samples, noise tells that a quantized model has lost its outputs, and the next form is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.core.metrics import sqnr
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model_file import read
from quark.onnx.search.latency.noise_sample import noise_sample
from quark.onnx.search.lost_outputs.on_noise import little_on_noise
from tests.commands.program import quark
from tests.models.onnx_zoo import Array, Builder, run

SIZE, FRAME = 64, 256


def spectra(power: float = -0.2) -> onnx.ModelProto:
    """Power spectra by a transform, a filter bank, and a root of the inverse of what it gives; no logarithm."""
    b = Builder()
    angles = 2 * np.pi / FRAME * np.outer(np.arange(FRAME), np.arange(FRAME // 2 + 1))
    for name, wave in (("re", np.cos(angles)), ("im", np.sin(angles))):
        part = b.node("MatMul", ["x", b.constant(f"{name}_w", wave)], name)
        b.node("Mul", [part, part], f"{name}_power")
    b.node("Add", ["re_power", "im_power"], "power")
    b.node("MatMul", ["power", b.constant("bank", b.random.uniform(0, 1, (FRAME // 2 + 1, 32)) ** 8)], "mel")
    b.node("Pow", [b.node("Add", ["mel", b.constant("floor", np.array(1e-9))], "floored"),
                   b.constant("root", np.array(power))], "y")  # fmt: skip
    return b.model({"x": ["n", "t", FRAME]}, {"y": ["n", "t", 32]})


def sound() -> Array:
    """What is loud at low frequencies, as most sound is."""
    random = np.random.default_rng(0)
    return np.cumsum(random.normal(size=(1, SIZE, FRAME)), axis=-1).astype(np.float32)


def test_noise_tells_what_sound_would() -> None:
    source = spectra()
    lost, kept = (
        ModelQuantizer(QConfig.get_default_config(name)).quantize_model(source)
        for name in ("UINT8_DYNAMIC_QUANT", "INT8_CPU_WEIGHTS")
    )
    assert lost is not None and kept is not None
    x = {"x": sound()}
    assert sqnr(run(source, x), run(lost, x)) < 10 and sqnr(run(source, x), run(kept, x)) > 20
    left = little_on_noise(read(source), lost, noise_sample(read(source)))
    assert left is not None and left.lost and "brown noise" in left.words
    assert little_on_noise(read(source), kept, noise_sample(read(source))) is None


def phases(end: str | None = None) -> onnx.ModelProto:
    """The real part of a transform over its magnitude: the quiet frequencies of brown noise say as much as the loud."""
    b = Builder()
    angles = 2 * np.pi / FRAME * np.outer(np.arange(FRAME), np.arange(FRAME // 2 + 1))
    for name, wave in (("re", np.cos(angles)), ("im", np.sin(angles))):
        part = b.node("MatMul", ["x", b.constant(f"{name}_w", np.hanning(FRAME)[:, None] * wave)], name)
        b.node("Mul", [part, part], f"{name}_power")
    b.node("Add", [b.node("Add", ["re_power", "im_power"], "power"), b.constant("floor", np.array(1e-12))], "floored")
    last = b.node("Div", ["re", b.node("Sqrt", ["floored"], "magnitude")], "y" if end is None else "phase")
    if end is not None:
        b.node(end, [b.node("Mul", [last, b.constant("sharp", np.array(8.0))], "scores")], "y")
    return b.model({"x": ["n", "t", FRAME]}, {"y": ["n", "t", FRAME // 2 + 1]})


def test_what_is_in_doubt_is_said_and_written() -> None:
    source = phases()
    quantized = ModelQuantizer(QConfig.get_default_config("INT8_CPU_DYNAMIC")).quantize_model(source)
    assert quantized is not None
    left = little_on_noise(read(source), quantized, noise_sample(read(source)))
    x = {"x": sound()}
    assert left is not None and not left.lost and "brown" in left.words
    assert 10 < sqnr(run(source, x), run(quantized, x)) < 20
    # Probabilities of noise say nothing of what a model is for.
    ended = phases("Softmax")
    bounded = ModelQuantizer(QConfig.get_default_config("INT8_CPU_DYNAMIC")).quantize_model(ended)
    assert bounded is not None
    assert little_on_noise(read(ended), bounded, noise_sample(read(ended))) is None


@pytest.mark.slow
def test_the_command_takes_what_keeps_the_outputs(tmp_path: Path) -> None:
    onnx.save(spectra(), tmp_path / "m.onnx")
    line = f"quantize {tmp_path}/m.onnx -o {tmp_path}/out.onnx --force"
    done = quark(*f"{line} --no-measure".split())
    assert done.code == 0 and "INT8_CPU_WEIGHTS: " in done.out
    said = quark(*f"{line} --config INT8_CPU_DYNAMIC".split())
    assert said.code == 0 and "on noise the quantized model has lost its outputs" in said.log
    silent = quark(*f"{line} --config INT8_CPU_DYNAMIC --allow-damage".split())
    assert silent.code == 0 and "noise" not in silent.log


def test_a_model_of_sound_runs_on_noise_that_is_long_enough() -> None:
    b = Builder()
    b.node("Conv", ["x", b.constant("w", b.random.normal(size=(2, 1, 512)))], "y")
    found = noise_sample(read(b.model({"x": ["n", 1, "t"]}, {"y": ["n", 2, "u"]})))
    assert found is not None and found[0]["x"].shape == (1, 1, 1024)
