"""The verdict on what a job of a folder has written, within a fifth of its time or 20 seconds.

text of a causal language model     windows of the calibration data that it did not read, else of the package's text
text of an encoder                  paragraphs of the package's text
anything else                       calibration data that it did not read, else some that it did, which is said
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.log import logger, severity
from quark.errors import LONGEST, ConfigError, one_line
from quark.goals.efforts import DEFAULT_TEXT, HELD_OUT_TEXT
from quark.jobs.folders.calibration import counted
from quark.jobs.folders.compared.verdict import Gates, ModelVerdict
from quark.jobs.folders.export import Export
from quark.jobs.folders.job import FolderJob
from quark.jobs.request import LENGTH
from quark.jobs.words import ONNX

if TYPE_CHECKING:
    from quark.jobs.folders.model_inputs import ModelInputs, StepInputs

BY_DEFAULT = True
"""True: a job that says nothing of a verdict gets one."""
SHARE, SECONDS = 0.2, 20.0
"""The time that a verdict may take: this share of the job, or so many seconds where that is more."""
MOST, FEWEST = 16, 2
"""Samples that are measured: windows of LENGTH tokens, or what else the model takes."""
AT_LEAST = 0.1
"""Seconds for a sample of a model whose time is not known before it runs."""
READ = 0.5e9
"""Bytes a second that a model is read with, in which it is decoded, too."""
BOTH = 6.0
"""Time of a forward of both models and of comparing what they give, over that of the linear layers of one, which are
measured; on a model of 135 million parameters."""


@dataclass(frozen=True)
class VerdictData:
    """Samples that both models run on.

    Attributes:
        batches: One sample each.
        name: Of the data, in words.
        path: Of the data.
        held_out: Whether nothing that made the model has read them.
    """

    batches: Sequence[Any]
    name: str
    path: Path
    held_out: bool = True


def require_verdict(job: FolderJob) -> None:
    """Raise ConfigError for bounds on a verdict that there will not be. Reads no weights."""
    gates = Gates.of(job.request)
    if not gates:
        if job.request.keep_anyway:
            raise ConfigError("--keep-anyway goes with --max-kl, --max-perplexity or --min-agreement. None is given.")
        return
    if job.request.verdict is False:
        raise ConfigError("--no-verdict with a bound on it: --max-kl and the like need one. Possible: one of them.")
    if (why := _why_not(job)) is not None:
        raise ConfigError(f"--max-kl, --max-perplexity and --min-agreement: no verdict is possible, as {why}.")
    from quark.jobs.folders.models import inputs_of, skeleton_of

    inputs = inputs_of(job.folder.path, skeleton_of(job.folder))
    gates.require(inputs.continues_text, inputs.model_class.__name__)


def verdict_of(job: FolderJob, export: Export, seconds: float) -> ModelVerdict | None:
    """The verdict on what a job has written; None where there is none, which is logged with the reason.

    Args:
        job: As it ran.
        export: What it wrote.
        seconds: What it took.

    Raises:
        QuarkError: There are bounds on the verdict, and it cannot be made.
    """
    request, gates = job.request, Gates.of(job.request)
    if request.verdict is False or (request.verdict is None and not gates and not BY_DEFAULT):
        return None
    why = _why_not(job)
    if why is None:
        try:
            found = _measured(job, export, None if gates or request.verdict else max(SECONDS, SHARE * seconds))
        except Exception as error:
            if gates or request.verdict:
                raise
            found = one_line(error).rstrip(".")[:LONGEST]
        if isinstance(found, ModelVerdict):
            return found
        why = found
    logger.info("No verdict: %s.", why)
    return None


def _why_not(job: FolderJob) -> str | None:
    """Why there can be no verdict, known before the job; None: there can."""
    from quark.torch.calibration.distributed import world

    if job.form == ONNX:
        return "an ONNX file is measured by `quark evaluate` of ONNX files alone"
    if world() > 1:
        return "several processes made the model, and `quark evaluate` measures in one"
    if not job.folder.is_read:
        return f"the folder is one of {job.folder.method}, which is not read as a float model"
    return None


def _measured(job: FolderJob, export: Export, allowed: float | None) -> ModelVerdict | str:
    """Measure the result, or say why that takes too long.

    Args:
        job, export: As for `verdict_of`.
        allowed: Seconds; None: as many as it takes.
    """
    from quark.jobs.folders.compared.measure import compare_outputs
    from quark.jobs.folders.compared.pairs import open_pair
    from quark.jobs.folders.models import inputs_of, open_folder, skeleton_of

    request, start = job.request, time.perf_counter()
    meta = skeleton_of(job.folder)
    inputs = inputs_of(job.folder.path, meta)
    count, needed = MOST, 0.0
    if allowed is not None:
        loading, each = _costs(job, export, meta, inputs.continues_text)
        count = min(MOST, int((allowed - loading) / each))
        needed = loading + FEWEST * each
    if count < FEWEST:
        return (
            f"it would take about {needed:.0f} s, more than {allowed:.0f} s. Possible: --verdict, or afterwards "
            "`quark evaluate`"
        )
    data = _held_out(job, inputs, count)
    if data is None:
        return f"{inputs.model_class.__name__} takes no text, and there are no data. Possible: --calib"
    path = export.path
    quantized = path if path.is_file() else open_folder(path, request.trust_remote_code)
    batches = data.batches
    with severity(2):
        pair = open_pair(job.folder, quantized, request.load, request.stream if request.dtype == "auto" else None)
        if allowed is not None and not inputs.continues_text:  # whose time is not known before the first of them
            before = time.perf_counter()
            compare_outputs(*pair, batches[:1])
            now = time.perf_counter()
            batches = batches[: max(1, int((allowed - (now - start)) / max(now - before, 1e-3)))]
        comparison = compare_outputs(*pair, batches)
    return ModelVerdict.of(
        comparison, data=f"{counted(batches)} of {data.name}", held_out=data.held_out, path=data.path,
        samples=len(batches), seconds=time.perf_counter() - start,
    )  # fmt: skip


def _costs(job: FolderJob, export: Export, meta: Any, text: bool) -> tuple[float, float]:
    """Estimate the seconds in which both models are loaded, and at least in which both run on one sample."""
    from quark.jobs.folders.models import float_bytes
    from quark.torch.flows.effort_costs import forward_seconds
    from quark.torch.model.batches import named_device

    loading = (float_bytes(job.folder) + export.size()) / READ
    if not text:
        return loading, AT_LEAST
    return loading, BOTH * forward_seconds(meta, LENGTH, named_device(job.request.device))


def _held_out(job: FolderJob, inputs: ModelInputs | StepInputs, count: int) -> VerdictData | None:
    """At most `count` samples that both models run on; None where there are none that the model takes."""
    calibration = job.calibration
    path, given = calibration.path, calibration.path not in (None, DEFAULT_TEXT)
    taken = calibration.most if given else 0
    length = calibration.length or LENGTH
    if given and path is not None and calibration.seed is None and not inputs.is_network:
        # A padded row of arrays may become several samples, of which calibration read all.
        read = taken if inputs.reads_text else len(inputs.read(path, taken, length, packing=calibration.packing))
        rest = inputs.read(path, taken + count, length, packing=calibration.packing)[read:]
        if len(rest) >= FEWEST:
            return VerdictData(rest, f"{path} that calibration did not read", path)
    if inputs.reads_text:
        name = "the package's held-out text"
        return VerdictData(inputs.read(HELD_OUT_TEXT, count, LENGTH), name, HELD_OUT_TEXT)
    if not given or path is None:
        return None
    known = inputs.read(path, min(count, taken), length, packing=calibration.packing)
    return VerdictData(known, f"{path}, which calibration read too", path, held_out=False)
