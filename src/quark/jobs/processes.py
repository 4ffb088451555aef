"""`quark quantize` under torchrun: its processes work together, where all of them write the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.base.command_line import started_processes
from quark.errors import NotSupportedError, UsageError
from quark.jobs.words import COMFYUI, ONNX


def refuse_processes(what: str) -> None:
    """Raise NotSupportedError under torchrun, for what one process makes."""
    if started_processes() > 1:
        raise NotSupportedError(
            f"{what} under torchrun ({started_processes()} processes): one process makes it. "
            "Possible: the same command without torchrun."
        )


@contextmanager
def together(
    onnx: bool, form: str, device: str = "cpu", timeout: float | None = None, **files: Path | None
) -> Iterator[None]:
    """Within: all processes that torchrun started share the work. One process alone is left as it is.

    Args:
        onnx: Whether the model is an ONNX file.
        form: A value of --export-format.
        device: A value of --device.
        timeout: A value of --process-timeout; None: that of `quark.torch.processes`.
        files: Further outputs that are asked for, by the names of their options.

    Raises:
        NotSupportedError: What is to be written is written by one process.
        UsageError: A timeout is given to one process.
        ConfigError, ProcessLostError: See `quark.torch.processes`.
    """
    if started_processes() == 1:
        if timeout is not None:
            raise UsageError(
                f"--process-timeout {timeout:g}: a process that is alone waits for none. Possible: no such option, or "
                "torchrun --nproc-per-node 2 -m quark quantize ..., which starts two."
            )
        yield
        return
    alone = ["an ONNX file"] if onnx else [f"--export-format {form}"] if form in (ONNX, COMFYUI) else []
    alone += [f"--{name.replace('_', '-')}" for name, path in files.items() if path is not None]
    if alone:
        refuse_processes(", ".join(alone))
    from quark.torch import processes  # imports torch

    with processes(**({} if timeout is None else {"timeout": timeout}), device=device):
        yield
