"""The documented names for kernels: RuntimeOptions, enable_native_inference, disable_native_inference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quark.errors import ConfigError, NotSupportedError
from quark.torch.kernels.accelerate import KERNELS, accelerate, count_packed, undo_acceleration
from quark.torch.kernels.kernel import Kernel

MODES = {"auto": tuple(KERNELS), "fp8_per_tensor": tuple(k for k in KERNELS if k.name == "scaled_mm")}
"""`native_linear_mode` -> the kernels that it allows."""

DOCUMENTED_MODES = (*MODES, "mxfp4", "flydsl_a8w4", "flydsl_svdquant")


@dataclass(frozen=True)
class RuntimeOptions:
    """Which kernels a frozen model uses.

    Attributes:
        native_linear_mode: "auto" (the fastest of all) or "fp8_per_tensor". "mxfp4", "flydsl_a8w4" and
            "flydsl_svdquant" name kernels of another package, which this one does not call: refused.
        use_preshuffle: Refused if True: weights are packed in the order of the kernel in any case.
        svdquant_overlap_streams: Refused if True, as "flydsl_svdquant" is.
    """

    native_linear_mode: str = "auto"
    use_preshuffle: bool = False
    svdquant_overlap_streams: bool = False

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that are allowed.

        Raises:
            ConfigError: There is no such mode.
            NotSupportedError: An option is one of kernels that are not called here.
        """
        mode = self.native_linear_mode
        if mode not in DOCUMENTED_MODES:
            raise ConfigError(f"native_linear_mode={mode!r}; possible: {', '.join(map(repr, MODES))}.")
        if mode not in MODES:
            raise NotSupportedError(
                f"native_linear_mode={mode!r}: kernels of AMD's aiter. Possible: {', '.join(MODES)}."
            )
        for name in ("use_preshuffle", "svdquant_overlap_streams"):
            if getattr(self, name):
                raise NotSupportedError(
                    f"{name}=True is an option of kernels that are not called here; leave it False."
                )
        return MODES[mode]


def enable_native_inference(model: nn.Module, *, runtime_options: RuntimeOptions | None = None) -> int:
    """Let quantized linear layers multiply with their codes; see `accelerate`.

    Args:
        model: As `accelerate` takes it; changed in place.
        runtime_options: Which kernels; None: the fastest.

    Returns:
        How many layers were changed.

    Raises:
        ConfigError: The model has no quantized layer, or an option does not exist.
        NotSupportedError: An option names a kernel of another package.
    """
    kernels, before = (runtime_options or RuntimeOptions()).kernels(), count_packed(model)
    accelerate(model, kernels=kernels)
    return count_packed(model) - before


def disable_native_inference(model: nn.Module) -> int:
    """Undo `accelerate`: frozen layers again, with the same weights, that can be exported and trained.

    The weights of a model that was loaded from a folder stay decoded.

    Args:
        model: Changed in place.

    Returns:
        How many layers were changed.
    """
    return undo_acceleration(model)
