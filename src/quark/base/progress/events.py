"""Lines of JSON: what loops say, for programs that watch a job."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from quark.base.files import check_file
from quark.base.progress import seconds_and_peak
from quark.errors import OutputError, OutputExistsError, one_line, visible


class _Events:
    """Where events are written; None: nowhere."""

    file: IO[str] | None = None
    path: Path | None = None


def write_event(event: str, **facts: Any) -> None:
    """Write an event to the file of `log_to`, if there is one, with the time in seconds since 1970 and
    the most memory so far.

    Raises:
        OutputError: The disk is full.
    """
    if _Events.file is None:
        return
    facts["peak_mb"] = seconds_and_peak.peak_mb()
    facts = {"event": event, "time": round(time.time(), 3), **_json_value(facts)}
    line = visible(json.dumps(facts, ensure_ascii=False))
    try:
        _Events.file.write(line + "\n")
        _Events.file.flush()
    except OSError as error:
        raise OutputError(f"Could not write {_Events.path}: {error.strerror}.") from error


def _json_value(value: Any) -> Any:
    """A value as JSON has it: numbers to six digits, and null in the place of NaN and Inf."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    return [_json_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_log(path: Path) -> None:
    """Raise where no log can be written.

    Raises:
        OutputError: The folder cannot be written, or it is no regular file.
        OutputExistsError: It is there, and is no log of an earlier run, after which this one goes on.
    """
    check_file(path, overwrite=True)
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 20)
        with path.open("ab"):
            pass
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from None
    known: Any = {}
    with suppress(ValueError):
        known = json.loads(first or '{"event": null}')
    if not isinstance(known, dict) or "event" not in known:
        raise OutputExistsError(f"{path} is there, and is no log of an earlier run. Choose another file.")


@contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """Within: what loops say is also written to a file, an object of JSON in each line; None: it is not.

    The last event is "done", or "failed" with the error. Raises as `check_log` does.
    """
    if path is None:
        yield
        return
    check_log(path)
    began, before = seconds_and_peak.seconds_now(), (_Events.file, _Events.path)
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from None
    _Events.file, _Events.path = file, path
    try:
        yield
        write_event("done", seconds=seconds_and_peak.seconds_now() - began)
    except BaseException as error:
        with suppress(OutputError):
            what = one_line(error) or type(error).__name__
            write_event("failed", error=what, seconds=seconds_and_peak.seconds_now() - began)
        raise
    finally:
        _Events.file, _Events.path = before
        with suppress(OSError):  # what a full disk did not take is written again when a file is closed
            file.close()
