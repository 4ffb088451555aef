"""`quark quantize` under torchrun: its processes work together, where the output is a folder that all of them write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.base.command_line import started_processes
from quark.errors import NotSupportedError
from quark.jobs.words import FILE_FORMS


def refuse_processes(what: str) -> None:
    """Raise NotSupportedError under torchrun, for what one process makes."""
    if started_processes() > 1:
        raise NotSupportedError(
            f"{what} under torchrun ({started_processes()} processes): one process makes it. "
            "Possible: the same command without torchrun."
        )


@contextmanager
def together(onnx: bool, form: str, **files: Path | None) -> Iterator[None]:
    """Within: all processes that torchrun started share the work. One process alone is left as it is.

    Args:
        onnx: Whether the model is an ONNX file.
        form: A value of --export-format.
        files: Further outputs that are asked for, by the names of their options.

    Raises:
        NotSupportedError: What is to be written is written by one process.
        ConfigError, ProcessLostError: See `quark.torch.processes`.
    """
    if started_processes() == 1:
        yield
        return
    alone = ["an ONNX file"] if onnx else [f"--export-format {form}"] if form in FILE_FORMS else []
    alone += [f"--{name.replace('_', '-')}" for name, path in files.items() if path is not None]
    if alone:
        refuse_processes(", ".join(alone))
    from quark.torch import processes  # imports torch

    with processes():
        yield
