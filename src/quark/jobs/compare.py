"""Compare: what several schemes would make of a model, in size and accuracy. No model is written."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quark.base.files import scratch_folder
from quark.base.log import logger, severity
from quark.base.progress import progress
from quark.errors import ConfigError, DamageError, QuarkError, UsageError, one_line
from quark.jobs.evaluate import MeasureFiles, MeasureFolders
from quark.jobs.folders.compared.verdict import Gates, ModelVerdict, word_of_kl
from quark.jobs.folders.gguf_files import as_folder
from quark.jobs.options import option, same_as
from quark.jobs.request import FolderRequest, JobRequest, Kinds, is_pipeline
from quark.jobs.words import check_words, members, scheme_names
from quark.report.page import PageTable
from quark.report.shown import Shown

if TYPE_CHECKING:
    pass

MEASURED_ON = "Held-out data to measure on. Default: --calib."


@dataclass(frozen=True, kw_only=True)
class CompareFolders(MeasureFolders):
    """Options of a comparison for a model folder."""

    schemes: tuple[str, ...] = option(
        (),
        "Schemes, GGUF mixes, families of schemes (int4), or configurations for an ONNX file; separated by commas, or "
        "repeated.",
        required=True,
    )
    calib: Path | None = same_as(JobRequest, "calib", help="Calibration data, as for `quark quantize`.")
    data: Path | None = same_as(MeasureFolders, "data", help=MEASURED_ON)


@dataclass(frozen=True, kw_only=True)
class CompareFiles(MeasureFiles):
    """Options of a comparison for an ONNX file."""

    schemes: tuple[str, ...] = same_as(CompareFolders, "schemes")
    calib: Path | None = same_as(CompareFolders, "calib")
    data: Path | None = same_as(MeasureFiles, "data", help=MEASURED_ON)


COMPARE: Kinds[CompareFolders, CompareFiles] = (CompareFolders, CompareFiles)


@dataclass(frozen=True)
class ComparisonJob:
    """A comparison that is ready to run.

    Attributes:
        request: What was asked for.
        names: The schemes, each once; of an ONNX file families are not looked up yet.
        data: What is measured on.
    """

    request: CompareFolders | CompareFiles
    names: Sequence[str]
    data: Path

    def words(self, samples: str) -> str:
        """Return the words of the title of the results about the data.

        Args:
            samples: How many of them were measured: "1 sample of 256 tokens".
        """
        return f"measured on {samples} from {self.data}" + ("" if self.request.data else ", the calibration data")


@dataclass(frozen=True)
class SchemeResult:
    """The results of one scheme.

    Attributes:
        name: Of the scheme or preset.
        size: Bytes of the weights, or of the file.
        sqnr: Of the worst output, in dB.
        kl: Mean KL divergence of the next token in nats; None for other models.
        perplexity: None for other models.
        agreement: Share of equal first choices; None for other models.
        seconds: Latency; None where it is not measured.
        reason: Why there is no result; "" where there is one.
    """

    name: str
    size: int = 0
    sqnr: float = math.nan
    kl: float | None = None
    perplexity: float | None = None
    agreement: float | None = None
    seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True, repr=False)
class ComparedSchemes(Shown):
    """The results of a comparison.

    Attributes:
        float_model: The row of the float model.
        schemes: A row of each scheme, as they were asked for.
        samples: How many samples were measured, in words.
    """

    float_model: SchemeResult
    schemes: Sequence[SchemeResult]
    samples: str

    def tables(self) -> list[PageTable]:
        """A row of each scheme."""
        float_row = self.float_model
        language = float_row.perplexity is not None
        timed = float_row.seconds is not None
        noted = any(row.reason for row in self.schemes)
        headers = ["scheme", "size MB", "of float", "SQNR dB", *(["KL nats", "perplexity", "loss"] if language else [])]
        headers += [*(["latency ms"] if timed else []), *(["note"] if noted else [])]
        cells = []
        for row in (float_row, *self.schemes):
            if row.reason:
                cells.append([row.name, *[""] * (len(headers) - 2), f"not possible: {row.reason}"])
                continue
            line = [row.name, f"{row.size / 1e6:.2f}", f"{row.size / float_row.size:.1%}"]
            line.append("" if row is float_row else f"{row.sqnr:.2f}")
            if language:
                line += ["" if row.kl is None else f"{row.kl:.4g}", f"{row.perplexity or math.nan:.3f}"]
                line.append("" if row.kl is None else word_of_kl(row.kl))
            if timed:
                line.append(f"{(row.seconds or math.nan) * 1e3:.3f}")
            cells.append(line + [""] * noted)
        return [PageTable(headers, cells, f"Schemes, measured on {self.samples}")]


def resolve_comparison(request: CompareFolders | CompareFiles) -> ComparisonJob:
    """Return the comparison of a request. Raises UsageError, or ConfigError for a word that there is not."""
    names = list(dict.fromkeys(name.strip() for item in request.schemes for name in item.split(",") if name.strip()))
    if not names:
        raise UsageError("--schemes names none. Possible: several with commas between them, as in int8_wo,mxfp4.")
    if isinstance(request, CompareFolders):
        names = members(names, scheme_names())
        check_words(names)
    data = request.data or request.calib
    if data is None:
        raise UsageError(f"Missing option --calib or --data, which {request.model} needs.")
    return ComparisonJob(request, names, data)


def run_comparison(job: ComparisonJob) -> ComparedSchemes:
    """Quantize by each scheme, and measure what it gives.

    Raises:
        ConfigError: There is no such configuration.
        QuarkError: None of the schemes can be used; says why of the last.
    """
    if isinstance(job.request, CompareFolders):
        with as_folder(job.request.model, job.request.dtype) as folder:
            return _of_folder(replace(job.request, model=folder), job)
    return _of_file(job.request, job)


def _of_folder(request: CompareFolders, job: ComparisonJob) -> ComparedSchemes:
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.gguf import MIXES
    from quark.jobs.folders.calibration import Calibration, counted
    from quark.jobs.folders.compared.candidates import Candidates
    from quark.jobs.folders.compared.measure import ALL
    from quark.jobs.folders.compared.pairs import reads_in_parts
    from quark.jobs.folders.models import inputs_of, open_folder, skeleton_of
    from quark.jobs.folders.schemes import config_of
    from quark.jobs.words import GGUF
    from quark.torch.flows.predicted_size import float_bytes, plan_of

    model, load = _network(request.model), request.load
    folder = open_folder(model, request.trust_remote_code)
    skeleton = skeleton_of(folder)
    candidates = Candidates(folder, load, reads_in_parts(folder, load, request.stream))
    inputs = inputs_of(model, skeleton if candidates.streams else candidates.before.model)
    Gates.of(request).require(inputs.continues_text, inputs.model_class.__name__)
    batches = inputs.read(job.data, request.windows or ALL, request.length, answers=True)
    samples = Calibration(request.calib).read(inputs)
    asked, perplexity = FolderRequest(model=model, trust_remote_code=request.trust_remote_code), list[float]()

    def measure(name: str) -> SchemeResult:
        form = GGUF if name in MIXES else "quark"
        config = config_of(asked, folder, name, form)
        comparison = candidates.compared(config, form, samples, batches)
        perplexity.extend((comparison.perplexity or ())[:1])
        found = ModelVerdict.of(comparison)
        text = () if found.perplexity is None else (found.kl, found.perplexity[1], found.agreement)
        return SchemeResult(name, plan_of(folder, config, form).after, found.sqnr, *text)

    rows = _measured(job.names, measure)
    size = float_bytes(skeleton, folder)
    return ComparedSchemes(SchemeResult("float", size, perplexity=next(iter(perplexity), None)), rows, counted(batches))


def check_bounds(job: ComparisonJob, compared: ComparedSchemes) -> None:
    """Raise DamageError where one of the schemes is outside of the bounds of the request; names each of them."""
    if not isinstance(job.request, CompareFolders):
        return
    gates, before = Gates.of(job.request), compared.float_model.perplexity
    outside = []
    for row in compared.schemes:
        perplexity = None if before is None or row.perplexity is None else (before, row.perplexity)
        if broken := gates.broken(row.kl, perplexity, row.agreement):
            outside.append(f"{row.name}: {broken}")
    if outside:
        raise DamageError(
            f"{len(outside)} of {len(compared.schemes)} schemes are outside of bounds. {'; '.join(outside)}."
        )


def _network(folder: Path) -> Path:
    """The folder of the one denoiser of a pipeline, or the folder itself. Raises ConfigError where it has several."""
    from quark.jobs.folders.pipeline import denoisers

    if not is_pipeline(folder):
        return folder
    names = denoisers(folder)
    if len(names) != 1:
        possible = ", ".join(str(folder / name) for name in names) or "the folder of a component"
        raise ConfigError(f"{folder} is a pipeline, and schemes are compared for one denoiser. Possible: {possible}.")
    logger.info("Component %s:", names[0])
    return folder / names[0]


def _of_file(request: CompareFiles, job: ComparisonJob) -> ComparedSchemes:
    # The flow imports onnx: when it runs, so that --help is instant.
    from quark.jobs.run_file import named_config, reader_of
    from quark.onnx import ModelQuantizer
    from quark.onnx.calibration.data.inputs import file_bytes
    from quark.onnx.config.preset_rows import QROWS, ROWS
    from quark.onnx.evaluation.compare_models import compare_models

    model, data = request.model, reader_of(request, job.data)
    calib = None if request.calib is None else reader_of(request, request.calib)
    # What is unknown is said before the first is tried.
    names = members(job.names, [*ROWS, *QROWS])
    quantizers = {name: ModelQuantizer(named_config(name)) for name in names}
    latency, measured = list[float](), list[int]()

    def measure(name: str) -> SchemeResult:
        quantizer = quantizers[name]
        quantizer.settings = replace(quantizer.settings, least_sqnr=None)  # how bad it is, is what is asked
        with scratch_folder(Path(tempfile.gettempdir())) as folder:
            file = folder / "quantized.onnx"
            for reader in filter(None, (calib, data)):
                reader.rewind()
            quantizer.quantize(model, file, calib)
            data.rewind()
            report = compare_models(model, file, data, request.samples, request.threads)
            before, seconds = report.latency
            latency.append(before)
            measured.append(report.samples)
            sqnr = min((output.sqnr for output in report.outputs.values()), default=math.nan)
            return SchemeResult(name, file_bytes(file), sqnr, seconds=seconds)

    rows = _measured(names, measure)
    count = measured[-1]
    samples = f"{count} sample{'s' if count != 1 else ''}"
    return ComparedSchemes(SchemeResult("float", file_bytes(model), seconds=latency[-1]), rows, samples)


def _measured(names: Sequence[str], measure: Callable[[str], SchemeResult]) -> list[SchemeResult]:
    """A row of each; why not of those that cannot be used. Raises QuarkError where that is so of all."""
    rows: list[SchemeResult] = []
    failure: QuarkError | None = None
    for name in progress(names, "schemes", len(names), name=str):
        try:
            with severity(2):
                rows.append(measure(name))
        except QuarkError as error:
            failure = error
            rows.append(SchemeResult(name, reason=one_line(error).rstrip(".")))
    if failure is not None and all(row.reason for row in rows):
        raise failure
    return rows
