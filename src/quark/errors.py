"""Every error that quark raises on purpose.

    QuarkError
    ├── ConfigError              a config, scheme, pattern or option is wrong          (also ValueError)
    │   └── UsageError           the command line is wrong; exit code 2
    ├── CalibrationError         the calibration data cannot give what the config needs (also ValueError)
    ├── NonFiniteError           NaN or Inf in a weight or an activation               (also ValueError)
    ├── ShapeError               a shape does not fit a granularity or a layout        (also ValueError)
    ├── StructureError           a part of a model was not found, or a change would alter outputs (also ValueError)
    ├── FormatError              a file or folder is corrupt, truncated or of another kind (also ValueError)
    ├── OutputExistsError        the output exists already, and --force is not given   (also FileExistsError)
    ├── OutputError              the output could not be written; no part of it was left (also OSError)
    ├── TooLittleMemoryError     a job needs more memory than is free                  (also MemoryError)
    ├── NotSupportedError        a documented option that this version does not have   (also NotImplementedError)
    ├── ProcessLostError         another process of a group died, failed or cannot be reached   (also RuntimeError)
    └── MissingDependencyError   an optional package is absent; has the pip command    (also ImportError)

Each message says what came, where, and what is possible.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from importlib.util import find_spec

USAGE = 2
"""The exit code of a program whose command line is wrong."""
INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""


class SignalledError(KeyboardInterrupt):
    """A signal that ends a process came, as of Docker, Slurm or a terminal that closed; it is met as Ctrl-C is.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class QuarkError(Exception):
    """Base of all errors raised by quark."""


class ConfigError(QuarkError, ValueError):
    """A configuration, scheme name, pattern or option is wrong."""


class UsageError(ConfigError):
    """The command line is wrong. It is raised before any work; exit code 2."""


class NothingQualifiesError(ConfigError):
    """An algorithm has no effect on a model."""


class NothingToQuantizeError(ConfigError):
    """A graph has no nodes that the configuration quantizes."""


class SlowerThanFloatError(ConfigError):
    """On this processor no integer kernels are faster than those of the float model."""


class CalibrationError(QuarkError, ValueError):
    """The calibration data are missing, do not fit the model, or do not reach a layer."""


class NonFiniteError(QuarkError, ValueError):
    """A weight or an activation contains NaN or infinity."""


class ShapeError(QuarkError, ValueError):
    """A shape does not fit a granularity or a storage layout."""


class StructureError(QuarkError, ValueError):
    """A part of a model could not be found, or a transformation would change its outputs although it must not."""


class FormatError(QuarkError, ValueError):
    """A file or folder is corrupt, truncated or of another kind."""


class OutputExistsError(QuarkError, FileExistsError):
    """The output exists already, and neither `overwrite=True` nor `--force` is given."""


class OutputError(QuarkError, OSError):
    """The output could not be written. Nothing incomplete was left on the disk."""


class ProcessLostError(QuarkError, RuntimeError):
    """Another process of the group died, failed or could not be reached. The message names it."""


class TooLittleMemoryError(QuarkError, MemoryError):
    """A job needs more memory than is free. It is raised before the job begins."""


class DamageError(QuarkError, ValueError):
    """The outputs of a quantized model differ too much from those of the float model."""


class NotSupportedError(QuarkError, NotImplementedError):
    """A documented feature that this version does not have yet."""


class MissingDependencyError(QuarkError, ImportError):
    """An optional package is needed for what was asked."""


def require_packages(purpose: str, extras: str, *packages: str) -> None:
    """Raise MissingDependencyError, with the line that installs it, for a package that is not installed.

    pip takes that line as it is, whatever this distribution was installed from.

    Args:
        purpose: What needs the packages: "The ONNX flow".
        extras: What brings them, of pyproject.toml: "onnx", or several with commas between them.
        packages: Names as they are imported. They are looked for, not loaded.
    """
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        raise MissingDependencyError(
            f"{purpose} needs the package {missing[0]}, which is not installed: pip install 'openquark[{extras}]'."
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a finder that refuses it, or a module that stands in for it
        return False


def interrupt_code(error: BaseException | None) -> int | None:
    """Return the exit code where an error is Ctrl-C or a signal, or came of one; None for any other.

    Libraries raise errors of their own where it falls into their work.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, SignalledError):
            return 128 + error.number
        if isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None


def is_panic(error: BaseException) -> bool:
    """Return True for what a library in Rust, such as tokenizers, gives up with: it is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal acts on, or that change the order in which others are shown; not tab and new line."""


def visible(text: str) -> str:
    r"""A text of files or users as it may be printed and written: control characters as escapes, such as \u001b.

    Names and templates of a stranger could clear a screen with them, and write on it. In JSON they are the same text.
    Bytes of a name that are not of the encoding of the system (surrogates) are escapes, too: no UTF-8 has them.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(message: object) -> str:
    """A message as one line that can be printed: those that quote a runtime have lines of their own."""
    return visible(" ".join(str(message).split()))


LONGEST = 300
"""Characters of a foreign error's message that are shown."""


def did_you_mean(name: str, known: Iterable[str], limit: int = 3) -> str:
    """Return a sentence that names the nearest of `known`, or all of them when none is near.

    >>> did_you_mean("uint4_wo_12", ["uint4_wo_128", "fp8"])
    "Did you mean 'uint4_wo_128'?"
    """
    options = sorted(set(known))
    near = difflib.get_close_matches(name, options, n=limit, cutoff=0.6)
    if near:
        return "Did you mean " + " or ".join(repr(option) for option in near) + "?"
    shown = ", ".join(repr(option) for option in options[:40])
    more = f" and {len(options) - 40} more" if len(options) > 40 else ""
    return f"Possible: {shown}{more}." if options else "There is nothing to choose from."
