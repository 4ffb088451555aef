"""`--log-file`, and the line that a command begins with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quark.base.files import check_apart
from quark.base.log import logger
from quark.base.progress import check_log
from quark.errors import OutputExistsError


def check_log_file(path: Path | None, output: str, read: Iterable[Path | None]) -> None:
    """Find what would stop the log before anything else runs.

    Args:
        path: Where it goes; None: there is none.
        output: What the command makes: a file, or a folder that is replaced.
        read: The model, and the files that the command reads or writes beside its output.

    Raises:
        OutputExistsError: It is, holds or lies in one of these; or it is no log.
        OutputError: It cannot be written.
    """
    if path is None:
        return
    for other in (output, *read):
        try:
            check_apart(path, other, whole=True)
        except OutputExistsError:
            raise OutputExistsError(
                f"--log-file {path} is, holds or lies in {other}, which is read or made. Choose another file."
            ) from None
    check_log(path)


def say_first(doing: str, model: Path, *words: str | None, output: str | Path | None = None) -> None:
    """Say what is going to be done, before libraries load that take seconds."""
    named = ", ".join(filter(None, words))
    to = "" if output is None else f" to {output}"
    logger.info("%s %s%s%s.", doing, model, f" ({named})" if named else "", to)
