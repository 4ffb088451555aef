"""TensorSpec and LayerSpec: what one tensor, and one layer, becomes. Frozen, checked once when made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from quark.core.blocks.block_types import BLOCK_TYPES, BlockType
from quark.core.dtypes import DTYPES, MICRO_EXPONENT, Dtype
from quark.core.granularity import Granularity, PerChannel, PerGroup, PerTensor
from quark.core.rounding import RoundType
from quark.errors import ConfigError


class ScaleType(Enum):
    """Type that a scale is rounded to before it is used."""

    float = "float"
    """The dtype of the model (float32 for a per-tensor integer scale and for live activations)."""
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    pof2 = "power_of_2"
    int16 = "int16"
    """M / 2^N with integers 1 <= M < 2^15 and 0 <= N <= 16: a multiplication and a shift in integers."""
    float8_e4m3 = "float8_e4m3"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"


class ScaleRule(Enum):
    """How the exponent of an E8M0 scale is taken from the largest magnitude of a block."""

    even = "even"
    """Round amax to the element's mantissa first (ties up), then floor(log2)."""
    floor = "floor"
    """floor(log2 amax): the rule of OCP MX v1.0, section 6.3."""
    ceil = "ceil"
    """ceil(log2 amax): nothing saturates by more than the element's last binade."""


class Learning(Enum):
    """How training changes a static scale; the formulas are in torch/layers/learned_scales.py."""

    lsq = "lsq"
    """Learned step size."""
    tqt = "tqt"
    """Trained threshold under a power-of-two scale."""


FLOAT_SCALES = (ScaleType.float, ScaleType.float32, ScaleType.float16, ScaleType.bfloat16)
"""Types fine enough that a scale may be any number."""

SHORT_SCALES = {ScaleType.float8_e8m0fnu: "e8m0", ScaleType.float8_e5m3: "e5m3", ScaleType.float8_e4m3: "e4m3"}
"""How a spec that is printed calls its scale type; the others by their value."""


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantized.

    Attributes:
        dtype: Element type.
        granularity: Which values share a scale.
        symmetric: Zero point fixed (0, or the middle of an unsigned type); integers only.
        dynamic: Scales come from each live tensor instead of from calibration.
        scale_type: Type that the scale is rounded to.
        scale_rule: How an E8M0 scale is derived from the largest magnitude.
        rounding: Rounding of the codes.
        float_zero_point: Keep the zero point unrounded (asymmetric integers); the range is not widened to 0.
        observer: Name of the statistic that finds the range of a static tensor.
        scale_spec: Quantizes the scales themselves (NVFP4: FP8 scales under one float32 scale).
        code_spec: Quantizes the codes once more (int4 of FP8 codes).
        learning: How training changes the scale; None keeps what calibration found.
    """

    dtype: Dtype
    granularity: Granularity = PerTensor()
    symmetric: bool = True
    dynamic: bool = False
    scale_type: ScaleType = ScaleType.float32
    scale_rule: ScaleRule = ScaleRule.even
    rounding: RoundType = RoundType.half_even
    float_zero_point: bool = False
    observer: str = "min_max"
    scale_spec: TensorSpec | None = None
    code_spec: TensorSpec | None = None
    learning: Learning | None = None

    def __post_init__(self) -> None:
        if self.scale_spec and self.code_spec:
            raise ConfigError("A TensorSpec takes scale_spec or code_spec, not both.")
        self._check_blocks()
        if self.float_zero_point and (self.symmetric or self.dtype.is_float):
            raise ConfigError("A float zero point needs an asymmetric integer type.")
        if self.scale_type is ScaleType.int16 and self.dynamic:
            raise ConfigError("Scales of the form M / 2^N are static: no graph rounds live ones to them.")
        if self.learning is not None:
            self._check_learning(self.learning)

    def _check_blocks(self) -> None:
        if self.dtype.is_block and not isinstance(self.granularity, PerGroup):
            raise ConfigError(
                f"{self.dtype} shares an exponent in blocks of {self.dtype.block} along one axis: "
                f"its granularity must be PerGroup(axis, size), got {self.granularity}."
            )
        if isinstance(self.dtype, BlockType) and (self.dynamic or self.granularity != PerGroup(-1, self.dtype.block)):
            raise ConfigError(
                f"{self.dtype} is a block type of GGUF files: for static weights, in groups of {self.dtype.block} "
                f"along the last axis; got {self.granularity}{' of live values' if self.dynamic else ''}."
            )
        if self.dtype.name in MICRO_EXPONENT and getattr(self.granularity, "size", 0) % 2:
            raise ConfigError(f"{self.dtype} shifts pairs: its block size must be even, got {self.granularity}.")

    def _check_learning(self, learning: Learning) -> None:
        two_levels = self.scale_spec is not None or self.code_spec is not None
        exact = self.scale_type is ScaleType.float32 and not self.dtype.is_block
        if self.dynamic or self.is_cast or two_levels or not exact:
            raise ConfigError(f"{learning.name.upper()} learns one static float32 scale; {self} has none.")
        if learning is Learning.tqt and (self.dtype.is_float or not self.symmetric):
            raise ConfigError(f"TQT trains the threshold of symmetric integers; got {self}.")

    @property
    def is_cast(self) -> bool:
        """True where the type is a plain 16-bit float, which has no scale."""
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def is_block(self) -> bool:
        """True where blocks along one axis share an exponent: a format of its own, or a scale of type E8M0."""
        shared = self.dtype.is_block or self.scale_type is ScaleType.float8_e8m0fnu
        return shared and isinstance(self.granularity, PerGroup)

    @property
    def has_zero_point(self) -> bool:
        """True where a zero point belongs to the scale (every plain integer type, symmetric or not)."""
        return not self.dtype.is_float and not self.dtype.is_block

    @property
    def split(self) -> Granularity:
        """The granularity of the stored step: pairs for the micro-exponent formats, groups for the block types, else
        `granularity`.
        """
        if isinstance(self.dtype, BlockType) and isinstance(self.granularity, PerGroup):
            return PerGroup(self.granularity.axis, self.dtype.group)
        if self.dtype.name in MICRO_EXPONENT and isinstance(self.granularity, PerGroup):
            return PerGroup(self.granularity.axis, 2, pad=True)
        return self.granularity

    @property
    def pairs(self) -> PerGroup:
        """Of a micro-exponent format: which of its steps, shaped as `split` stores them, share one block."""
        granularity = self.granularity
        assert isinstance(granularity, PerGroup)
        return PerGroup(granularity.axis, max(1, granularity.size // 2), pad=True)

    @property
    def needs_calibration(self) -> bool:
        """True where data must be seen before the tensor can be quantized."""
        if self.is_cast or (self.dtype.is_block and self.dynamic):
            return False
        return not self.dynamic or (self.scale_spec is not None and not self.scale_spec.dynamic)

    def __str__(self) -> str:
        parts = [str(self.dtype), "" if self.is_cast else str(self.granularity)]
        if self.has_zero_point and not self.symmetric:
            parts.append("asymmetric")
        if self.scale_type not in (ScaleType.float, ScaleType.float32):
            parts.append(SHORT_SCALES.get(self.scale_type, self.scale_type.value))
        if self.dynamic:
            parts.append("dynamic")
        if self.learning is not None:
            parts.append(self.learning.name)
        second = self.scale_spec or self.code_spec
        text = " ".join(filter(None, parts))
        return f"{text} -> {second}{' on scales' if self.scale_spec else ''}" if second else text


@dataclass(frozen=True)
class LayerSpec:
    """The specs of the tensors of one layer; None leaves a tensor in float."""

    weight: TensorSpec | None = None
    bias: TensorSpec | None = None
    input: TensorSpec | None = None
    output: TensorSpec | None = None

    @property
    def needs_data(self) -> bool:
        """True where activations must be calibrated."""
        return any(spec is not None and spec.needs_calibration for spec in (self.input, self.output))

    @property
    def dynamic_input(self) -> bool:
        """True where the input is quantized as it comes; block formats apart, which find their scales the same way."""
        return self.input is not None and self.input.dynamic and not self.input.is_block

    def __str__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}: {spec}" for name, spec in shown.items() if spec) or "float"


def by_row(spec: TensorSpec) -> bool:
    """Return True where no scale of a matrix is shared by two of its rows."""
    split = spec.split
    return (isinstance(split, PerChannel) and split.axis == 0) or (
        isinstance(split, PerGroup) and split.axis in (-1, 1)
    )


def spec(dtype: str, granularity: Granularity | None = None, **options: object) -> TensorSpec:
    """Short form: `spec("int8", PerChannel(0), symmetric=False)`."""
    return TensorSpec(DTYPES[dtype], granularity or PerTensor(), **options)  # type: ignore[arg-type]


def block_spec(name: str) -> TensorSpec:
    """The spec of a weight in a block type of `BLOCK_TYPES`."""
    dtype = BLOCK_TYPES[name]
    return TensorSpec(dtype, PerGroup(-1, dtype.block), observer="block")
