"""The documented algorithm configs (`algo_config=[...]`): parameters only.

`scaling_layers`, `inside_layer_modules` and `model_decoder_layers` may stay empty: quark then finds the structure in
the model. The order of arguments and the defaults are those of AMD Quark.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from quark.base.checked import checked_dataclass, known_keys
from quark.errors import ConfigError

__all__ = [
    "AWQConfig", "AlgoConfig", "AutoRoundConfig", "AutoSmoothQuantConfig", "DistillationConfig", "EqualizeConfig",
    "GPTAQConfig", "GPTQConfig", "ImatrixConfig", "ImportanceScaleConfig", "OnlineRotationConfig", "PreQuantOptConfig",
    "QronosConfig", "QuaRotConfig", "RotationConfig", "SVDQuantConfig", "SmoothQuantConfig",
]  # fmt: skip

Layers = list[dict[str, Any]]
Modules = list[str]
OWN = {"own": True}
"""Metadata of a field that AMD Quark's class does not have."""


@dataclass
class AlgoConfig:
    """Base of all algorithm configs.

    Attributes:
        keep_better: Whether a block stays unchanged if the algorithm raises the error of its output. It is True for an
            algorithm that is given by its name ("gptq"), and False for one whose config you write out. It is not stored
            in checkpoints.

    Raises:
        ConfigError: A field is unknown, of the wrong type or out of range. The message names the field.
    """

    keep_better: bool = field(default=False, kw_only=True, compare=False)
    is_documented: ClassVar[bool] = True
    """True where AMD Quark reads such a config from a checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the algorithm as JSON values."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "keep_better"}

    def documented_dict(self) -> dict[str, Any]:
        """Return the fields that AMD Quark's class of this name has, which refuses others; as JSON values."""
        own = {entry.name for entry in dataclasses.fields(self) if entry.metadata.get("own")}
        return {name: value for name, value in self.to_dict().items() if name not in own}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what `to_dict` returned. Raises ConfigError for a field that the class does not have."""
        return cls(**known_keys(data, cls))


class PreQuantOptConfig(AlgoConfig):
    """Base of what runs before quantization; kept for code that names it."""


@checked_dataclass
class SmoothQuantConfig(PreQuantOptConfig):
    """SmoothQuant (Xiao et al. 2022) with one alpha for all layers.

    The factor of a channel is `act_max^alpha / weight_max^(1 - alpha)`. It is folded into the layer before.

    Attributes:
        alpha: How much of the range moves from the inputs to the weights, from 0 to 1.
        scale_clamp_min: The smallest factor.
        scaling_layers: The folds of one block, each a dict with `prev_op`, `layers` and `inp`; empty: they are found.
        model_decoder_layers: Name of the list of blocks, such as "model.layers"; empty: it is found.

    Example:
        >>> SmoothQuantConfig(alpha=0.8).alpha
        0.8
    """

    name: str = "smooth"
    alpha: float = 1
    scale_clamp_min: float = 1e-3
    scaling_layers: Layers = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class AWQConfig(AlgoConfig):
    """AWQ (Lin et al. 2023): a search for factors of channels that protect salient weights, and for ranges.

    Attributes:
        scaling_layers: As in `SmoothQuantConfig`.
        model_decoder_layers: As in `SmoothQuantConfig`.
    """

    name: str = "awq"
    scaling_layers: Layers = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with an alpha that is searched for each group of layers that read one tensor.

    Attributes:
        scaling_layers: As in `SmoothQuantConfig`.
        model_decoder_layers: As in `SmoothQuantConfig`.
        compute_scale_loss: The error that is compared: "MSE", "RMSE" or "MAE".
    """

    name: str = "autosmoothquant"
    scaling_layers: Layers | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str | None = "MSE"


@checked_dataclass
class EqualizeConfig(AlgoConfig):
    """Factors of channels that give inputs and weights proportional norms: for 4-bit floats with quantized inputs.

    AMD Quark has no such algorithm.

    Attributes:
        scaling_layers: As in `SmoothQuantConfig`.
        model_decoder_layers: As in `SmoothQuantConfig`.
    """

    is_documented: ClassVar[bool] = False

    name: str = "equalize"
    scaling_layers: Layers = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class ImportanceScaleConfig(AlgoConfig):
    """Weight scales that minimise the squared error, weighted by the second moments of the inputs.

    AMD Quark has no such algorithm.

    Attributes:
        inside_layer_modules: Layers of a block to which it applies, such as "mlp.down_proj"; empty: all.
        model_decoder_layers: As in `SmoothQuantConfig`.
    """

    is_documented: ClassVar[bool] = False
    name: str = "importance"
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class ImatrixConfig(AlgoConfig):
    """Weight scales that are weighted by an importance matrix of llama.cpp.

    `gguf_config(imatrix=...)` makes such a config for a model.

    Attributes:
        file: Path of the importance matrix, a GGUF or .dat file.
        tensors: Name of a layer -> name of its tensor in the file.
    """

    is_documented: ClassVar[bool] = False
    name: str = "imatrix"
    file: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


class _ColumnOrder:
    """The common fields of the configs of GPTQ, GPTAQ and Qronos.

    Attributes:
        desc_act: Visit the columns with the largest second moments first. Needs `static_groups=True`.
        static_groups: Find all scales before the columns are visited. False: the scale of a group is found when its
            first column is reached.
        group_aware_order: Order the groups, and the columns in each, by importance. Takes the place of `desc_act`.
        refine_passes: Refinements after the first solution, 0 or more. Each fits the scales to the codes and rounds
            every column again. Costs about two forwards of the data.
        fisher: Weight the errors by their effect on the distribution that the model predicts, in a further solution
            with as many refinements. "auto": if the model has logits and the memory suffices.
    """

    desc_act: bool
    static_groups: bool
    group_aware_order: bool
    refine_passes: int
    fisher: bool | Literal["auto"]

    def _check(self) -> None:
        kind = type(self).__name__
        if self.desc_act and not self.static_groups:
            raise ConfigError(f"{kind}: desc_act=True needs static_groups=True: reordered columns would mix groups.")
        if self.desc_act and self.group_aware_order:
            raise ConfigError(f"{kind}: group_aware_order takes the place of desc_act; set desc_act=False.")
        if self.refine_passes < 0:
            raise ConfigError(f"{kind}.refine_passes: {self.refine_passes} is below 0.")
        if self.fisher and self.refine_passes == 0:
            raise ConfigError(f"{kind}: fisher={self.fisher!r} refines: refine_passes must be 1 or more.")


@checked_dataclass
class GPTQConfig(_ColumnOrder, AlgoConfig):
    """GPTQ (Frantar et al. 2022): rounds column by column, and spreads each error over the columns that follow.

    The base class describes `desc_act`, `static_groups`, `group_aware_order`, `refine_passes` and `fisher`.

    Attributes:
        block_size: Accepted and without effect: columns are visited by recursive halving.
        damp_percent: The share of the mean second moment that is added to the diagonal.
        inside_layer_modules: Layers of a block that are solved, such as "mlp.down_proj"; empty: all.
        model_decoder_layers: As in `SmoothQuantConfig`.

    Example:
        >>> GPTQConfig(desc_act=False, static_groups=False, refine_passes=3).refine_passes
        3
    """

    name: str = "gptq"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    group_aware_order: bool = field(default=False, metadata=OWN)
    refine_passes: int = field(default=1, metadata=OWN)
    fisher: bool | Literal["auto"] = field(default=False, metadata=OWN)


@checked_dataclass
class GPTAQConfig(_ColumnOrder, AlgoConfig):
    """GPTAQ (Li et al. 2025): GPTQ that also compensates for the errors of the layers before.

    `GPTQConfig` describes the other fields.

    Attributes:
        alpha: The share of these errors that is compensated, from 0 to 1.
    """

    name: str = "gptaq"
    block_size: int = 128
    damp_percent: float = 0.01
    alpha: float = 0.25
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    group_aware_order: bool = field(default=False, metadata=OWN)
    refine_passes: int = field(default=1, metadata=OWN)
    fisher: bool | Literal["auto"] = field(default=False, metadata=OWN)


@checked_dataclass
class QronosConfig(_ColumnOrder, AlgoConfig):
    """Qronos (Zhang et al. 2025): corrects the errors of the layers before, then rounds.

    `GPTQConfig` describes the other fields.

    Attributes:
        alpha: The share of the largest eigenvalue of the second moments that is added to their diagonal; at most the
            median of that diagonal is.
        beta: Accepted and without effect.
    """

    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    name: str = "qronos"
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 1e-3
    beta: float = 1e4
    group_aware_order: bool = field(default=False, metadata=OWN)
    refine_passes: int = field(default=1, metadata=OWN)
    fisher: bool | Literal["auto"] = field(default=False, metadata=OWN)


@checked_dataclass
class OnlineRotationConfig:
    """Rotations that run in each forward instead of being folded into weights.

    Attributes:
        shared_parallel: Whether all rotated layers share the same random signs.
        online_rotation_layers: Names of the layers whose inputs are rotated, as checkpoints list them.
        use_input_prescale: Not part of this version.
    """

    shared_parallel: bool
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


@checked_dataclass
class RotationConfig(PreQuantOptConfig):
    """Hadamard rotations (QuaRot, SpinQuant).

    Attributes:
        scaling_layers: The residual stream by hand (`first_layer`, `middle_layers`, `last_layer`); empty: it is found.
        r1: Rotate the residual stream; folded into weights.
        r2: Rotate the values of each attention head; folded into weights.
        r3: Rotate queries and keys after the rotary embedding, in each forward.
        r4: Rotate the input of the down projection, in each forward.
        rotation_size: Rotate blocks of so many channels; None: whole axes.
        random_r1, random_r2: Multiply the matrix by random signs from a fixed seed.
        backbone, model_decoder_layers, v_proj, o_proj, self_attn, mlp: Names of modules, as AMD Quark takes them.
        online_r1_rotation: Rotate the inputs of layers that read a norm in each forward, instead of the stream.
        online_config: Details of `online_r1_rotation`.
        where_possible: Leave a model that cannot be rotated so as it is, and log why; else that is an error.
        trainable: Learn R1 and R2, starting from their Hadamard matrices.
        train_smooth, smooth_positions: Not part of this version.
        train_steps: Steps of learning, 1 or more.
        train_batch_size: Calibration batches of a step, 1 or more.
        train_lr: Length of the first step, as a share of the longest possible one: above 0 and at most 1. It falls
            linearly to 0.

    Example:
        >>> RotationConfig(r2=True, r4=True, rotation_size=32).r1
        True
    """

    scaling_layers: dict[str, Layers] | None = field(default_factory=dict)
    name: str = "rotation"
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = "model.layers"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | None = None
    trainable: bool = False
    train_smooth: bool | None = None
    smooth_positions: list[str] | None = None
    train_steps: int = field(default=100, metadata=OWN)
    train_batch_size: int = field(default=8, metadata=OWN)
    train_lr: float = field(default=1.0, metadata=OWN)
    where_possible: bool = field(default=False, compare=False, metadata=OWN)

    @classmethod
    def _accept(cls, values: dict[str, Any]) -> None:
        if isinstance(values.get("online_config"), dict):
            values["online_config"] = OnlineRotationConfig(**values["online_config"])

    def _check(self) -> None:
        if self.rotation_size is not None and self.rotation_size < 1:
            raise ConfigError(f"{type(self).__name__}.rotation_size: {self.rotation_size} is below 1.")
        for name in ("train_steps", "train_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{type(self).__name__}.{name}: {getattr(self, name)} is below 1.")
        if not 0 < self.train_lr <= 1:
            raise ConfigError(f"{type(self).__name__}.train_lr: {self.train_lr} is not above 0 and at most 1.")


@checked_dataclass
class QuaRotConfig(RotationConfig):
    """RotationConfig under its older name, with all four rotations on."""

    name: str = "quarot"
    r2: bool = True
    r3: bool = True
    r4: bool = True


@checked_dataclass
class AutoRoundConfig(AlgoConfig):
    """AutoRound (Cheng et al. 2023): rounding and ranges, learned by signed gradient descent on the output of a block.

    Attributes:
        iters: Steps for each block.
        lr: Learning rate of the rounding, in steps of the grid. It falls linearly to 0.
        enable_minmax_tuning: Also learn the two ends of each range, between half and all of it.
        minmax_lr: Learning rate of the ends of ranges.
        batch_size: Calibration batches of a step.
        inside_layer_modules: As in `GPTQConfig`.
        model_decoder_layers: As in `SmoothQuantConfig`.
        fisher: As in `GPTQConfig`; the errors are those of the output of the block.
    """

    is_documented: ClassVar[bool] = False
    name: str = "autoround"
    iters: int = 200
    lr: float = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: float = 1 / 200
    batch_size: int = 8
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    fisher: bool | Literal["auto"] = field(default=False, metadata=OWN)


@checked_dataclass
class DistillationConfig(AlgoConfig):
    """Codes and scales that are learned together from the predictions of the float model. Runs after other algorithms.

    Attributes:
        epochs: Passes over the data, 1 or more.
        lr: Learning rate of the codes, in mean steps of the grid, from 0 to 1. None: such that all steps, with random
            signs, move a code by a fifth of a step of the grid.
        scale_lr: Learning rate of the logarithms of float scales, from 0 to 1. None: a tenth of `lr`.
        batch_size: Samples of a step, 1 or more, if they have the same length.
    """

    is_documented: ClassVar[bool] = False
    name: str = "distillation"
    epochs: int = 2
    lr: float | None = None
    scale_lr: float | None = None
    batch_size: int = 4

    def _check(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"DistillationConfig.{name}: {getattr(self, name)} is below 1.")
        for name in ("lr", "scale_lr"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate <= 1:
                raise ConfigError(f"DistillationConfig.{name}: {rate} is not between 0 and 1.")


@checked_dataclass
class SVDQuantConfig(AlgoConfig):
    """SVDQuant (Li et al. 2024): a low-rank branch in the dtype of the model beside each quantized layer.

    A branch of rank r beside a layer of n inputs and m outputs has r (n + m) values.

    Attributes:
        svd_rank: The rank, 1 or more.
        smooth_alpha: Alpha of the smoothing before the decomposition, from 0 to 1, if `search_alpha` is False.
        search_alpha: Search alpha for each layer among `alpha_candidates`.
        alpha_candidates: Values from 0 to 1; None: 0.05 to 0.95.
        alpha_search_max_samples: Calibration batches for this search, 1 or more.
        exclude_patterns: Patterns of names of layers that get no branch.
        min_layer_size: The shortest side of a layer with a branch, 1 or more.
        use_gptq: Round the remaining weight with GPTQ.
        gptq_n_bits, gptq_symmetric, gptq_group_size: Must agree with the scheme (-1: the group size of the scheme).
        gptq_blocksize: Accepted and without effect.
        gptq_percdamp, gptq_actorder: `damp_percent` and `desc_act` of GPTQ.
        correction_layers: The only layers that may have a branch; in a checkpoint, those that have one.
        refine_passes: The most times that the branch is fitted again to the error of rounding, 0 or more.
    """

    name: str = "svdquant"
    svd_rank: int = 32
    smooth_alpha: float = 0.5
    search_alpha: bool = True
    alpha_candidates: list[float] | None = None
    alpha_search_max_samples: int = 8
    exclude_patterns: list[str] = field(
        default_factory=lambda: ["time_embedding", "add_time_proj", "conv_in", "conv_out", "time_proj"]
    )
    min_layer_size: int = 256
    use_gptq: bool = False
    gptq_n_bits: int = 4
    gptq_symmetric: bool = True
    gptq_group_size: int = -1
    gptq_blocksize: int = 128
    gptq_percdamp: float = 0.01
    gptq_actorder: bool = False
    correction_layers: list[str] | None = field(default=None, metadata=OWN)
    refine_passes: int = field(default=8, metadata=OWN)

    def _check(self) -> None:
        least = {"svd_rank": 1, "alpha_search_max_samples": 1, "min_layer_size": 1, "refine_passes": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ConfigError(f"{type(self).__name__}.{name}: {getattr(self, name)} is below {lowest}.")
        for alpha in (self.smooth_alpha, *(self.alpha_candidates or ())):
            if not 0 <= alpha <= 1:
                raise ConfigError(f"{type(self).__name__}: alpha={alpha} is not between 0 and 1.")
        if self.alpha_candidates == []:
            raise ConfigError(f"{type(self).__name__}.alpha_candidates is empty. Possible: None, or some of 0 to 1.")
