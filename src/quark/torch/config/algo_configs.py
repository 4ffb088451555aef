"""The documented algorithm configs (`algo_config=[...]`): parameters only.

`scaling_layers`, `inside_layer_modules` and `model_decoder_layers` may stay empty: the structure is then found in
the model. Argument order and defaults are the documented system's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from quark.base.checked import checked_dataclass
from quark.errors import ConfigError

__all__ = [
    "AWQConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "DistillationConfig",
    "GPTAQConfig",
    "GPTQConfig",
    "ImatrixConfig",
    "ImportanceScaleConfig",
    "OnlineRotationConfig",
    "PreQuantOptConfig",
    "QronosConfig",
    "QuaRotConfig",
    "RotationConfig",
    "SVDQuantConfig",
    "SmoothQuantConfig",
]

Layers = list[dict[str, Any]]
Modules = list[str]


@dataclass
class AlgoConfig:
    """Base of all algorithm configs.

    Attributes:
        keep_better: Whether a block whose output error an algorithm raises is left as it was. So it is where algorithms
            are named; one whose config is written out runs as written. No part of the record: it is how to run.
    """

    keep_better: bool = field(default=False, kw_only=True, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the algorithm, as JSON holds them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "keep_better"}


class PreQuantOptConfig(AlgoConfig):
    """Base of what runs before quantization; kept for code that names it."""


@checked_dataclass
class SmoothQuantConfig(PreQuantOptConfig):
    """SmoothQuant (Xiao et al. 2022): s = act_max^alpha / weight_max^(1 - alpha), folded into what precedes."""

    name: str = "smooth"
    alpha: float = 1
    scale_clamp_min: float = 1e-3
    scaling_layers: Layers = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class AWQConfig(AlgoConfig):
    """AWQ (Lin et al. 2023): searches the channel scales that protect salient weights."""

    name: str = "awq"
    scaling_layers: Layers = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with alpha searched for each group of layers by `compute_scale_loss`."""

    name: str = "autosmoothquant"
    scaling_layers: Layers | None = None
    model_decoder_layers: str | None = None
    compute_scale_loss: str | None = "MSE"


@checked_dataclass
class ImportanceScaleConfig(AlgoConfig):
    """Weight scales that minimise the square error weighted by the second moments of the inputs; quark's own name."""

    name: str = "importance"
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""


@checked_dataclass
class ImatrixConfig(AlgoConfig):
    """Scales weighed by an importance matrix of llama.cpp; `gguf_config(imatrix=...)` makes one for a model.

    Attributes:
        file: The importance matrix, GGUF or .dat.
        tensors: Name of a layer -> its tensor in the file.
    """

    name: str = "imatrix"
    file: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


class _ColumnOrder:
    """What the GPTQ family has in common.

    Beside the documented fields: `group_aware_order` orders groups, and the columns in each, by importance, so that
    scales may be found on the way; `refine_passes` times, scales are fitted to the codes and each column is rounded
    again; with `fisher` ("auto": where possible) as often by the model's distribution. `block_size`, `beta` do nothing.
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
    """GPTQ (Frantar et al. 2022): column by column, the error spread over the columns that follow."""

    name: str = "gptq"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    group_aware_order: bool = False
    refine_passes: int = 1
    fisher: bool | Literal["auto"] = False


@checked_dataclass
class GPTAQConfig(_ColumnOrder, AlgoConfig):
    """GPTAQ (Li et al. 2025): GPTQ against the float model's activations, weighted by alpha."""

    name: str = "gptaq"
    block_size: int = 128
    damp_percent: float = 0.01
    alpha: float = 0.25
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    group_aware_order: bool = False
    refine_passes: int = 1
    fisher: bool | Literal["auto"] = False


@checked_dataclass
class QronosConfig(_ColumnOrder, AlgoConfig):
    """Qronos (Zhang et al. 2025): corrects past quantization error, then rounds."""

    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    name: str = "qronos"
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 1e-3
    beta: float = 1e4
    group_aware_order: bool = False
    refine_passes: int = 1
    fisher: bool | Literal["auto"] = False


@checked_dataclass
class OnlineRotationConfig:
    """Rotations that run with the model instead of being folded into weights."""

    shared_parallel: bool
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


@checked_dataclass
class RotationConfig(PreQuantOptConfig):
    """Hadamard rotations (QuaRot, SpinQuant): r1 residual, r2 heads of v/o, r3 queries and keys, r4 down.

    `trainable` learns r1 and r2 in `train_steps` steps of `train_batch_size` calibration batches, whose length falls
    from `train_lr` of the longest one to 0; these three are quark's own.
    """

    scaling_layers: dict[str, Layers] = field(default_factory=dict)
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
    train_steps: int = 100
    train_batch_size: int = 8
    train_lr: float = 1.0

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
    """AutoRound (Cheng et al. 2023): rounding and clipping learned by signed gradient descent.

    Beside the documented fields: with `fisher` ("auto": where possible) errors of a block weigh by what they do to the
    distribution that the model gives.
    """

    name: str = "autoround"
    iters: int = 200
    lr: float = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: float = 1 / 200
    batch_size: int = 8
    inside_layer_modules: Modules = field(default_factory=list)
    model_decoder_layers: str = ""
    fisher: bool | Literal["auto"] = False


@checked_dataclass
class DistillationConfig(AlgoConfig):
    """Codes and scales learned together from the outputs of the float model, behind any other algorithm.

    Attributes:
        epochs: Passes over the data.
        lr: Rate of the codes, in mean steps of the grid; None: so that steps of random sign move one by a fifth.
        scale_lr: Rate of the logarithms of scales, where their type is fine enough to move; None: a tenth of `lr`.
        batch_size: Samples of a step, where they are equally long.
    """

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
    """SVDQuant (Li et al. 2024): a low-rank branch in high precision carries the outliers.

    Beside the documented fields: `correction_layers` lists the only layers that may have a branch, in a checkpoint
    those that have one; `refine_passes` is how often the branch is fitted again to what rounding the rest has lost.
    `gptq_n_bits`, `gptq_symmetric` and `gptq_group_size` (-1: the scheme's) must be those of the scheme;
    `gptq_blocksize` is a step of another implementation and changes nothing here.
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
    correction_layers: list[str] | None = None
    refine_passes: int = 8

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
