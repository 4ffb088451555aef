"""Resolve: what is done for a request, as far as its words say it: at once, and before a library is loaded.

`quark plan` stops after it and after `configure_folder.configure`; everything else runs what comes out of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quark.base.log import logger
from quark.errors import ConfigError, OutputError, UsageError
from quark.goals import GoalChoice
from quark.goals.facts import ONNX_FILE
from quark.goals.goal import GOALS
from quark.jobs.choose import chosen
from quark.jobs.folders.job import FolderJob, opener
from quark.jobs.request import FileRequest, FolderRequest
from quark.jobs.words import COMFYUI, GGUF, check_words, layer_schemes

NAMED = {".gguf": GGUF, ".safetensors": COMFYUI}
"""End of the name of an output -> its form, where nothing else is said."""


@dataclass(frozen=True)
class FileJob:
    """A job for an ONNX file that is ready to run.

    Attributes:
        request: What was asked for.
        choice: What its goal chose; None without a goal.
        config: Name of a configuration; None: the flow finds one for this processor.
        target: A value of --target; None as the configuration says.
        data: Calibration data that are no path: a reader, feeds or arrays.
    """

    request: FileRequest
    choice: GoalChoice | None
    config: str | None
    target: str | None
    data: Any = None
    form: str = ONNX_FILE


def resolve(request: FolderRequest | FileRequest, data: Any = None) -> FolderJob | FileJob:
    """Return the job of a request.

    Args:
        request: What was asked for.
        data: Calibration data that are no path.

    Raises:
        QuarkError: A word is unknown, words do not go together, or the program of a goal is not known to take it.
    """
    if "output" in request.said and not request.output:
        raise OutputError("--output '' is no path. Possible: the name of a folder, or of a file for an ONNX model.")
    if isinstance(request, FolderRequest) and request.goal is None:
        words = [request.scheme, *layer_schemes(request.layer)]
        check_words(words, request.export_format, request.algorithm, request.dtype)
        _check_amount(request)
    open = opener(request) if isinstance(request, FolderRequest) else None
    choice = chosen(request, request.calib is not None or data is not None, open)
    job: FolderJob | FileJob
    if isinstance(request, FileRequest):
        job = _job_of_file(request, choice, data)
        if choice is not None:
            logger.info("%s", choice)
    else:
        assert open is not None
        named = NAMED.get(Path(request.output).suffix, "quark")
        form = choice.form if choice is not None else request.export_format or named
        job = FolderJob(request, choice, form, open)
    return job


def _job_of_file(request: FileRequest, choice: GoalChoice | None, data: Any) -> FileJob:
    config, target = request.config, request.target
    if choice is not None:
        asked = choice.asked
        # For ONNX Runtime the flow itself finds the configuration that is best on this processor.
        found_by_flow = choice.goal is GOALS["onnxruntime"] and asked.scheme is None and asked.bits is None
        config = None if found_by_flow else choice.scheme
        target = choice.target_with(request.target)
    if request.prefer is not None and config is not None:
        raise ConfigError(f"--prefer chooses a configuration, and {config} is given. Possible: without it.")
    return FileJob(request, choice, config, target, data)


def _check_amount(request: FolderRequest) -> None:
    """Raise UsageError where nothing says what the layers become."""
    # Half of a budget is told where budgets are read.
    budget = request.bits is not None or request.size is not None or request.candidates or request.sensitivity
    if request.scheme is None and not budget:
        raise UsageError(f"Missing option --scheme or --for, which {request.model} needs.")
