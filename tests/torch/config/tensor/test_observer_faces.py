"""The documented observer classes: names, families, what they compute, and classes of one's own; and the enums."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from quark.compat.torch_names.shorthand_specs import OCP_MXFP4Spec
from quark.core.array import Array
from quark.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from quark.core.observers import OBSERVERS
from quark.core.observers.min_max import MinMaxObserver
from quark.core.quantize import compute_qparams
from quark.core.spec import spec
from quark.errors import CalibrationError, ConfigError, NonFiniteError, NotSupportedError
from quark.torch.config.lowering import lower_tensor
from quark.torch.config.tensor import observer_classes as faces
from quark.torch.config.tensor.enums import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.config.tensor.observer_classes import OBSERVER_CLASSES, ObserverBase, observer_class
from quark.torch.config.tensor.tensor_config import QTensorConfig
from quark.torch.quantization import observer as package
from quark.torch.quantization.observer import observer as address

PUBLIC = [name for name in OBSERVER_CLASSES if not name.startswith("_")]
SPLITS: dict[QSchemeType, dict[str, Any]] = {
    QSchemeType.per_tensor: {},
    QSchemeType.per_channel: {"ch_axis": 0},
    QSchemeType.per_group: {"ch_axis": -1, "group_size": 32},
    QSchemeType.per_block: {"block_size": (4, 32)},
}


def config(cls: type[ObserverBase], dtype: Dtype = Dtype.int8) -> QTensorConfig:
    if cls.observer == "placeholder":
        return QTensorConfig(Dtype.float16, cls)
    qscheme = cls.family or QSchemeType.per_tensor
    if cls.observer in ("block", "mx_diffs"):
        return QTensorConfig(Dtype.fp4, cls, False, qscheme, scale_format="e8m0", **SPLITS[qscheme])
    return QTensorConfig(
        dtype, cls, False, qscheme, symmetric=True, round_method=RoundType.half_even, scale_type=ScaleType.float,
        **SPLITS[qscheme],
    )  # fmt: skip


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_face_observes(name: str) -> None:
    cls = OBSERVER_CLASSES[name]
    assert getattr(address, name) is getattr(package, name) is getattr(faces, name) is cls
    face = cls(config(cls), device="cpu")
    batches = [values(1), values(2) * 3]
    for batch in batches:
        assert face(batch) is batch
    scale, zero = face.calculate_qparams()
    core = OBSERVERS[cls.observer](face.statistic.spec)
    for batch in batches:
        core.update(batch)
    assert torch.equal(scale, torch.as_tensor(core.qparams().scale))
    assert scale.shape == face.statistic.spec.split.scale_shape((8, 64)) and scale.dtype == torch.float32
    assert zero.shape == scale.shape and zero.dtype == torch.int32
    if cls.observer.startswith("pof2"):
        assert torch.equal(torch.log2(scale), torch.log2(scale).round())


def test_min_max_is_the_formula() -> None:
    x = values()
    face = faces.PerTensorMinMaxObserver(config(faces.PerTensorMinMaxObserver))
    face(x[:4])
    face(x[4:])
    scale, zero = face.calculate_qparams()
    assert scale == x.abs().max() / 127.5 and zero == 0


def test_a_face_takes_a_core_spec_and_quantized_scales() -> None:
    nvfp4 = spec("fp4_e2m1", PerGroup(-1, 16), scale_spec=spec("fp8_e4m3"), observer="block")
    face = faces.PerBlockMXObserver(nvfp4)
    face(values())
    params = compute_qparams(values(), nvfp4)
    assert params.second is not None
    assert torch.allclose(face.calculate_qparams()[0], params.scale * params.second.scale)


def test_a_face_of_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="QTensorConfig or a TensorSpec, got 'int8'"):
        faces.PerTensorMinMaxObserver("int8")


def test_float_zero_points_stay_floats() -> None:
    made = QTensorConfig(
        Dtype.uint4, faces.PerChannelMinMaxObserver, False, QSchemeType.per_channel, 0, symmetric=False,
        round_method=RoundType.half_even, scale_type=ScaleType.float32, zero_point_type="float32",
    )  # fmt: skip
    face = faces.PerChannelMinMaxObserver(made)
    face(values())
    assert face.calculate_qparams()[1].dtype == torch.float32


def test_bad_data() -> None:
    face = faces.PerTensorMinMaxObserver(config(faces.PerTensorMinMaxObserver))
    with pytest.raises(CalibrationError):
        face.calculate_qparams()
    face(torch.tensor([1.0, float("nan")]))
    with pytest.raises(NonFiniteError):
        face.calculate_qparams()


def test_core_names_to_classes() -> None:
    for name, split, expected in [
        ("min_max", PerTensor(), "PerTensorMinMaxObserver"),
        ("min_max", PerChannel(0), "PerChannelMinMaxObserver"),
        ("min_max", PerToken(), "PerChannelMinMaxObserver"),
        ("min_max", PerGroup(), "PerGroupMinMaxObserver"),
        ("min_max", PerBlock(), "PerBlock2DMinMaxObserver"),
        ("moving_average", PerTensor(), "PerTensorMovingAverageMinMaxObserver"),
        ("histogram", PerTensor(), "PerTensorHistogramObserver"),
        ("quantile_search", PerTensor(), "PerTensorHistogramObserverPro"),
        ("entropy", PerTensor(), "PerTensorEntropyObserver"),
        ("pof2_non_overflow", PerTensor(), "PerTensorPowOf2NonOverflowObserver"),
        ("pof2_non_overflow", PerChannel(0), "PerChannelPowOf2NonOverflowObserver"),
        ("block", PerGroup(), "PerBlockMXObserver"),
        ("mx_diffs", PerGroup(), "PerBlockMXDiffsObserver"),
        ("placeholder", PerTensor(), "PlaceholderObserver"),
    ]:
        assert observer_class(name, split).__name__ == expected
    with pytest.raises(ConfigError, match="'percentile' per_group"):
        observer_class("percentile", PerGroup())
    # (TQTObserver starts with kl_j where its TQTSpec, or the tensor, says so; modes of MinMSE are options of ONNX.)
    modes = {"mse_percentile", "mse_centers", "pof2_mse_percentile", "pof2_most_common"}
    assert {cls.observer for cls in OBSERVER_CLASSES.values()} == set(OBSERVERS) - {"kl_j"} - modes


def test_an_observer_of_ones_own() -> None:
    class Halved(MinMaxObserver):
        def range(self) -> tuple[Array, Array]:
            low, high = self.extremes()
            return low / 2, high / 2

    OBSERVERS.register("halved", Halved)
    try:

        class PerTensorHalvedObserver(ObserverBase):
            observer: ClassVar[str] = "halved"
            family = QSchemeType.per_tensor

        made = config(PerTensorHalvedObserver)
        assert QTensorConfig.from_dict(made.to_dict()) == made
        lowered = lower_tensor(made)
        assert lowered is not None and lowered.observer == "halved"
        face = PerTensorHalvedObserver(made)
        face(torch.tensor([-2.0, 4.0]))
        assert face.calculate_qparams()[0] == torch.tensor(2.0) / 127.5
    finally:
        OBSERVERS.unregister("halved")
        OBSERVER_CLASSES.unregister("PerTensorHalvedObserver")


@pytest.mark.parametrize("dtype", Dtype)
def test_dtypes(dtype: Dtype) -> None:
    assert Dtype.from_str(dtype.name) is dtype
    if dtype is Dtype.mx:
        with pytest.raises(NotSupportedError, match="mx_element_dtype"):
            dtype.to_bitwidth()
        return
    assert Dtype.from_row(dtype.row) is dtype
    assert dtype.to_bitwidth() == dtype.row.bits
    assert isinstance(dtype.to_torch_packed_dtype(), torch.dtype)


def test_dtype_names_and_storage() -> None:
    packed = {"int2": "int32", "int4": "int32", "uint4": "int32", "uint2": "uint8", "int3": "uint8", "fp4": "uint8",
              "fp6_e3m2": "uint8", "fp8_e5m3": "uint8", "int8": "int8", "fp8_e4m3": "float8_e4m3fn"}  # fmt: skip
    for name, storage in packed.items():
        assert Dtype[name].to_torch_packed_dtype() is getattr(torch, storage)
    torch_types = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.bfloat16: "bfloat16"}
    for torch_type, name in torch_types.items():
        assert Dtype.from_torch_dtype(torch_type) is Dtype[name]
    for make in (lambda: Dtype.from_str("itn8"), lambda: Dtype.from_torch_dtype(torch.float32)):
        with pytest.raises(ConfigError, match="Unknown Dtype"):
            make()


def test_the_range_seen_is_shown_and_forgotten() -> None:
    """The numbers are those of amd-quark 0.13."""
    x = torch.tensor([[1.0, -2.0, 3.0, 0.5], [4.0, -5.0, 0.25, 1.0]])
    for cls, low, high in (
        (faces.PerTensorMinMaxObserver, -5.0, 4.0),
        (faces.PerChannelMinMaxObserver, [-2.0, -5.0], [3.0, 4.0]),
    ):
        face = cls(config(cls))
        assert (face.min_val, face.max_val) == (torch.inf, -torch.inf)
        face(x)
        assert face.min_val.flatten().tolist() == torch.tensor(low).flatten().tolist()
        assert face.max_val.flatten().tolist() == torch.tensor(high).flatten().tolist()
        first = face._calculate_qparams()[0]
        face.reset_min_max_vals()
        assert (face.min_val, face.max_val) == (torch.inf, -torch.inf)
        with pytest.raises(CalibrationError):
            face.calculate_qparams()
        face(x * 0.5)
        assert torch.equal(face._calculate_qparams()[0], first / 2)
        face.reset_state()
        face(x)
        assert torch.equal(face.calculate_qparams()[0], first)


def test_qparams_of_a_range_are_computed_without_observing() -> None:
    spec = QTensorConfig(
        Dtype.uint8, faces.PerTensorMinMaxObserver, False, QSchemeType.per_tensor, symmetric=False,
        round_method=RoundType.half_even, scale_type=ScaleType.float,
    )  # fmt: skip
    face = faces.PerTensorMinMaxObserver(spec)
    scale, zero = face.calculate_qparams(torch.tensor(-3.0), torch.tensor(4.0))
    assert scale.item() == pytest.approx(7 / 255) and zero.item() == 109, "as amd-quark 0.13 has it"
    with pytest.raises(ConfigError, match="both min_val and max_val"):
        face.calculate_qparams(torch.tensor(1.0))


# Printed by get_scale of amd-quark 0.13 for these magnitudes, with eps = 1e-8; four digits.
MAGNITUDES = [1.0, 3.0, 5.0, 7.9]
SCALES = {
    ("int8", "float32"): [7.8740e-03, 2.3622e-02, 3.9370e-02, 6.2205e-02],
    ("even", "float32"): [0.16667, 0.5, 0.83333, 1.3167],
    ("even", "e8m0"): [0.25, 0.5, 1.0, 2.0],
    ("floor", "e8m0"): [0.25, 0.5, 1.0, 1.0],
    ("ceil", "e8m0"): [0.25, 1.0, 2.0, 2.0],
    ("even", "e5m3"): [0.1719, 0.5, 0.8125, 1.375],
}


@pytest.mark.parametrize(("kind", "scale_format"), SCALES)
def test_scales_of_known_magnitudes(kind: str, scale_format: str) -> None:
    if kind == "int8":
        face: ObserverBase = faces.PerTensorMinMaxObserver(config(faces.PerTensorMinMaxObserver))
    else:
        spec = OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False, scale_calculation_mode=kind).to_quantization_spec()
        face = faces.PerBlockMXObserver(spec)
    found = face.get_scale(torch.tensor([*MAGNITUDES, 0.0]), 1e-8, scale_format)
    # Half a unit of the last digit that was printed.
    assert found[:-1].tolist() == pytest.approx(SCALES[kind, scale_format], rel=5e-4) and found[-1] == torch.tensor(
        1e-8
    )


def test_an_unknown_format_of_scales_is_refused() -> None:
    face = faces.PerTensorMinMaxObserver(config(faces.PerTensorMinMaxObserver))
    with pytest.raises(ConfigError, match="possible: float32, e8m0, e4m3, e5m3"):
        face.get_scale(torch.ones(1), 1e-8, "e4m4")
    plain = faces.PlaceholderObserver(config(faces.PlaceholderObserver))
    with pytest.raises(ConfigError, match="float16 has no scale"):
        plain.get_scale(torch.ones(1), 1e-8, "float32")
