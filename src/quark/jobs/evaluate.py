"""Evaluate: a float and a quantized model side by side, on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.files import require_regular
from quark.base.log import logger
from quark.errors import ConfigError, UsageError
from quark.goals.efforts import HELD_OUT_TEXT
from quark.jobs.folders.calibration import counted
from quark.jobs.folders.compared.task_scores import TaskScores, check_metric
from quark.jobs.folders.compared.verdict import Gates, ModelVerdict
from quark.jobs.folders.gguf_files import as_folder
from quark.jobs.options import option, same_as
from quark.jobs.request import (
    FileRequest,
    FolderRequest,
    JobRequest,
    Kinds,
    Loading,
    ModelRequest,
    is_gguf,
    is_pipeline,
)
from quark.report.page import PageTable
from quark.report.shown import Shown

if TYPE_CHECKING:
    from quark.core.metrics import Comparison
    from quark.jobs.folders.compared.measure import MeasuredFolders
    from quark.onnx import PathDataReader
    from quark.onnx.evaluation.compare_models import Report
    from quark.torch.flows.compared.denoiser_costs import DenoiserCosts

IN_BLOCKS = "Load one block of each model at a time; the results are the same. Default: if memory is too small."


@dataclass(frozen=True, kw_only=True)
class MeasureRequest(ModelRequest):
    """Options of a measurement of either kind of model."""

    report: Path | None = same_as(JobRequest, "report", key="")
    log_file: Path | None = same_as(JobRequest, "log_file")
    data: Path | None = option(
        None, "Held-out data: a text, JSON lines, a folder of images, audio or arrays, .npz, or .npy (ONNX)."
    )


@dataclass(frozen=True, kw_only=True)
class MeasureFolders(MeasureRequest):
    """Options of a measurement of model folders."""

    length: int = option(256, "Tokens in a window.", least=2)
    windows: int = option(64, "Number of windows, or of other samples, to use; 0: all.", least=0)
    device: str = same_as(FolderRequest, "device")
    dtype: str = same_as(FolderRequest, "dtype")
    trust_remote_code: bool = same_as(FolderRequest, "trust_remote_code")
    keep_unexpected: bool = same_as(FolderRequest, "keep_unexpected")
    stream: bool | None = same_as(FolderRequest, "stream", help=IN_BLOCKS)
    max_kl: float | None = same_as(
        FolderRequest,
        "max_kl",
        key="",
        help="Largest mean KL divergence from the float model, in nats; above it the exit code is 1.",
    )
    max_perplexity: float | None = same_as(FolderRequest, "max_perplexity", key="")
    min_agreement: float | None = same_as(FolderRequest, "min_agreement", key="")

    @property
    def load(self) -> Loading:
        """How both models are loaded."""
        return Loading(self.device, self.dtype, self.trust_remote_code, self.keep_unexpected)


@dataclass(frozen=True, kw_only=True)
class MeasureFiles(MeasureRequest):
    """Options of a measurement of ONNX files."""

    samples: int | None = option(None, "Number of samples to use. Default: all.", least=1)
    batch_size: int | None = same_as(FileRequest, "batch_size", key="")
    mean: str | None = same_as(FileRequest, "mean", key="")
    std: str | None = same_as(FileRequest, "std", key="")
    pixel_max: int | None = same_as(FileRequest, "pixel_max", key="")
    colours: str | None = same_as(FileRequest, "colours", key="")
    resize: str | None = same_as(FileRequest, "resize", key="")
    threads: int = option(1, "Threads of ONNX Runtime.", least=1)


@dataclass(frozen=True, kw_only=True)
class EvaluateFolders(MeasureFolders):
    """Options of a measurement of two folders. `quantized` may be a GGUF file, too."""

    quantized: Path
    layers: int = option(10, "Number of layers to show, those with the largest errors first.", least=0)
    layer_costs: bool = option(
        False,
        "Measure what each layer costs the output if it alone is quantized, on the first sample, and show those that "
        "cost most. It takes a run of the float model for each layer.",
        "--layer-costs",
    )
    prompt: tuple[str, ...] | None = option(
        None,
        "For a pipeline of diffusers: prompt of a picture; repeatable. Default with --report: two built-in prompts.",
    )
    num_inference_steps: int | None = option(
        None, "For a pipeline of diffusers: steps of a picture. Default: that of the pipeline.", least=1
    )
    text: Path | None = option(None, "Another name for --data.", key=None)
    metric: str | None = option(
        None,
        "Figure of a task beside those of the outputs: of JSON lines choice (choices in each line: the accuracy), "
        "exact_match (what is written) or loss (none); of images in a subfolder for each class, or with labels.csv, "
        "accuracy; of an ONNX file and images with boxes.json, map; or MODULE:FUNCTION of a file in the current "
        "folder, whose code runs: it gets the model (of an ONNX file the session) and the samples, and returns a "
        "number. Default: what the data hold.",
    )
    tasks: tuple[str, ...] | None = option(
        None,
        "Tasks of the package lm-eval, names or .yaml files, with commas between them, that both models answer. "
        "Nothing is downloaded: their data are in the cache of datasets, or beside the file. Without --data the rest "
        "is measured on the text of the package; of each task all questions are asked, or as many as --windows says.",
    )
    card: bool = option(
        False,
        "Write the figures into the model card (README.md) of the quantized folder. The data must not be those that it "
        "was calibrated on.",
        "--card",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateFiles(MeasureFiles):
    """Options of a measurement of two ONNX files."""

    quantized: Path
    layers: int = same_as(EvaluateFolders, "layers")
    metric: str | None = same_as(EvaluateFolders, "metric")
    boxes: str | None = option(
        None,
        "With --metric map: which outputs are boxes, such as boxes=OUTPUT,scores=OUTPUT,labels=OUTPUT, with form=xyxy, "
        "xywh or cxcywh and unit=pixels or unit. Default: outputs of these names, corners in pixels.",
    )


@dataclass(frozen=True, repr=False)
class MeasuredFiles(Shown):
    """Two ONNX files and what was measured of them.

    Attributes:
        request: What was asked for.
        report: What running both on the samples showed.
        reader: The samples.
        sizes: Bytes of each.
        task: What both reach on a task, where `metric` says one; else None.
    """

    request: EvaluateFiles
    report: Report
    reader: PathDataReader
    sizes: Sequence[int]
    task: TaskScores | None = None

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """Of the float and of the quantized model on a task; None without one that has it."""
        return None if self.task is None else self.task.scores.get("accuracy")

    @property
    def outputs(self) -> Mapping[str, Comparison]:
        """How near each output is."""
        return self.report.outputs

    @property
    def seconds(self) -> Sequence[float]:
        """Latency of each for the first sample."""
        return self.report.latency

    def tables(self) -> list[PageTable]:
        """Both files, their outputs, a task, and the nodes whose outputs lost most."""
        report, threads = self.report, self.request.threads
        both = [
            (name, f"{size / 1e6:.2f}", f"{seconds * 1e3:.3f}{change}")
            for name, size, seconds, change in zip(
                ("float", "quantized"), self.sizes, report.latency,
                ("", f" (x{report.latency[0] / report.latency[1]:.2f} speed)"), strict=True,
            )
        ]  # fmt: skip
        outputs = [
            (name, f"{found.cosine:.6f}", f"{found.l2:.6g}", f"{found.psnr:.2f}", f"{found.sqnr:.2f}")
            for name, found in report.outputs.items()
        ]
        layers = [
            (each.node, each.op_type, each.tensor, f"{each.sqnr:.1f}",
             "" if each.rescaled else f"{each.damage.cosine:.6f}",
             "up to the scales of its channels" if each.rescaled else "")
            for each in report.layers[: self.request.layers]
        ]  # fmt: skip
        latency = f"latency ms ({threads} thread{'s' if threads > 1 else ''})"
        samples = f"{report.samples} sample{'' if report.samples == 1 else 's'} of {self.reader.path.name}"
        tables = [
            PageTable(("", "size MB", latency), both, "Float against quantized"),
            PageTable(("output", "cosine", "L2", "PSNR dB", "SQNR dB"), outputs, f"Outputs over {samples}"),
            *([] if self.task is None else [self.task.table()]),
            PageTable(("node", "op", "tensor", "SQNR dB", "cosine", ""), layers, "Layers, worst output first"),
        ]
        return [table for table in tables if table.rows]


EVALUATE: Kinds[EvaluateFolders, EvaluateFiles] = (EvaluateFolders, EvaluateFiles)


def held_out(request: EvaluateFolders | EvaluateFiles) -> Path:
    """The data that are measured on.

    Raises:
        UsageError: There are none.
        ConfigError: They were given twice.
    """
    text = request.text if isinstance(request, EvaluateFolders) else None
    if request.data is not None and text is not None:
        raise ConfigError("--data and --text are the same option; give one of them.")
    data = request.data or text
    if data is None and isinstance(request, EvaluateFolders) and request.tasks is not None:
        return HELD_OUT_TEXT
    if data is None:
        flags = "--data or --text" if isinstance(request, EvaluateFolders) else "--data"
        raise UsageError(f"Missing option {flags}, which {request.model} needs.")
    return data


def evaluate_files(request: EvaluateFiles) -> MeasuredFiles:
    """Run both ONNX files on the data. Raises QuarkError where these cannot be read, or are not of each other."""
    from quark.jobs.run_file import reader_of  # imports onnx: when it runs, so that --help is instant

    return measure_files(request, reader_of(request, held_out(request)))


def measure_files(request: EvaluateFiles, reader: PathDataReader) -> MeasuredFiles:
    """Run both ONNX files on the samples of a reader, from where it is."""
    from quark.jobs.folders.compared.file_tasks import file_task
    from quark.onnx.calibration.data.inputs import file_bytes
    from quark.onnx.evaluation.compare_models import compare_models
    from quark.onnx.graph.sessions import open_session

    task = file_task(request.metric, reader, request.boxes)
    report = compare_models(request.model, request.quantized, reader, request.samples, request.threads)
    files = (request.model, request.quantized)
    scores = None
    if task is not None:
        reader.rewind()
        scores = task([open_session(file, threads=request.threads) for file in files], islice(reader, request.samples))
    return MeasuredFiles(request, report, reader, [file_bytes(file) for file in files], scores)


def evaluate_folders(request: EvaluateFolders) -> MeasuredFolders:
    """Run the models of both folders on the data. Raises QuarkError as `evaluate_files` does."""
    if not is_gguf(request.model):
        return _evaluate(request)
    held_out(request)  # what is missing is said before the file is read
    with as_folder(request.model, request.dtype) as folder:
        return _evaluate(replace(request, model=folder))


def _evaluate(request: EvaluateFolders) -> MeasuredFolders:
    """Compare a float model that is a folder with its quantized one. Raises QuarkError as `evaluate_folders` does."""
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.jobs.folders.card import check_card, figures_of
    from quark.jobs.folders.compared.harness import Harness
    from quark.jobs.folders.compared.measure import ALL, measure_folders
    from quark.jobs.folders.compared.pairs import open_pair
    from quark.jobs.folders.compared.tasks import task_of, with_tasks
    from quark.jobs.folders.models import inputs_of, open_folder
    from quark.torch.flows.compared.coded_layers import coded_layers
    from quark.torch.writers.model_card import add_figures

    model, quantized, data = request.model, request.quantized, held_out(request)
    check_metric(request.metric)
    if request.card:
        check_card(quantized)
    for path in filter(is_pipeline, (model, quantized)):
        raise ConfigError(f"{path} is a pipeline of several models. Possible: the folder of one, in both.")
    for name in ("prompt", "num_inference_steps"):
        if getattr(request, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for the pictures of a pipeline of diffusers, and {model} is one model.")
    folder, made = open_folder(model, request.trust_remote_code), None
    if is_gguf(quantized):
        require_regular(quantized)
    else:
        made = open_folder(quantized, request.trust_remote_code)
        for each in (folder, made):
            each.check()
        _require_same_architecture(folder.config, made.config)
    before, after = open_pair(folder, quantized if made is None else made, request.load, request.stream)
    if not coded_layers(after.model):
        logger.info("%s holds no quantized layer: two float models are compared.", quantized)
    inputs = inputs_of(model, before.model)
    Gates.of(request).require(inputs.continues_text, inputs.model_class.__name__)
    batches = inputs.read(data, request.windows or ALL, request.length, answers=True)
    task = task_of(request.metric, inputs, data, request.windows or ALL, before.is_streamed)
    limit = request.windows if "windows" in request.said else 0
    harness = None if request.tasks is None else Harness(request.tasks, inputs, before.is_streamed, limit or None)
    page, costs = request.report is not None, request.layer_costs
    measured = measure_folders(model, quantized, (before, after), inputs, batches, page, costs)
    measured = with_tasks(measured, (before, after), task, harness)
    if request.card:
        add_figures(quantized, figures_of(measured, data, request.length))
        logger.info("The figures are in the model card of %s.", quantized)
    return measured


def verdict_on(measured: MeasuredFolders, data: Path) -> ModelVerdict:
    """The verdict on a quantized model that was measured on held-out data."""
    return ModelVerdict.of(measured.comparison, data=f"{counted(measured.batches)} of {data.name}")


def check_bounds(request: EvaluateFolders, measured: MeasuredFolders) -> None:
    """Raise DamageError where a measured model is outside of the bounds of a request."""
    Gates.of(request).check(verdict_on(measured, held_out(request)), "")


@dataclass(frozen=True, repr=False)
class MeasuredPipeline(Shown):
    """Two pipelines of diffusers and what was measured of them.

    Attributes:
        components: Name of a denoiser -> what was measured of it.
        pictures: Name of a denoiser -> what the pipeline makes with both; none where no prompt and no page is asked
            for.
    """

    components: Mapping[str, MeasuredFolders]
    pictures: Mapping[str, DenoiserCosts]

    def tables(self) -> list[PageTable]:
        """The tables of each denoiser, with its name."""
        return [
            replace(table, title=f"{name}: {table.title}")
            for name, measured in self.components.items()
            for table in measured.tables()
        ]


def evaluate_pipeline(request: EvaluateFolders) -> MeasuredPipeline:
    """Run the denoisers of both pipelines on recorded steps, and make pictures with both.

    Raises:
        ConfigError: One of both is no pipeline, or no denoiser is quantized; steps are said of no picture.
        QuarkError: As `evaluate_folders`.
    """
    from quark.jobs.folders.pipeline import data_of, denoisers
    from quark.torch.model.folder_files import components

    for path, other in ((request.model, request.quantized), (request.quantized, request.model)):
        if not is_pipeline(path):
            raise ConfigError(f"{path} is one model, and {other} a pipeline. Possible: the folder of one, in both.")
    Gates.of(request).require(False, "a pipeline")
    pictures = _shows_pictures(request)
    made, steps = request.quantized, held_out(request)
    coded = [name for name in components(made) if _is_quantized(made / name)]
    known = denoisers(request.model)
    names, others = ([name for name in coded if (name in known) is wanted] for wanted in (True, False))
    if not names:
        raise ConfigError(f"{made} holds no quantized denoiser. Possible: the folders of a component.")
    if others:
        logger.info("Not measured, as recorded steps are those of denoisers: %s.", ", ".join(others))
    part = replace(request, text=None, prompt=None, num_inference_steps=None)
    measured = {
        name: evaluate_folders(
            replace(part, model=request.model / name, quantized=made / name, data=data_of(steps, name))
        )
        for name in names
    }
    return MeasuredPipeline(measured, _pictures(request, measured) if pictures else {})


def _pictures(request: EvaluateFolders, measured: Mapping[str, MeasuredFolders]) -> Mapping[str, DenoiserCosts]:
    """The pictures of both pipelines by the name of the denoiser; none of what was read block by block."""
    if not all(each.seconds for each in measured.values()):
        logger.info("No pictures: both pipelines would have to be in memory.")
        return {}
    from quark.jobs.folders.pictures import pictures_of

    return pictures_of(request.model, measured, request.prompt, request.num_inference_steps)


def _shows_pictures(request: EvaluateFolders) -> bool:
    """Return True where pictures are made, which both pipelines in memory can. Raises ConfigError where not."""
    if request.prompt and request.stream:
        raise ConfigError("--prompt with --stream: pictures need both models in memory. Possible: one of them.")
    pictures = bool(request.prompt) or (request.report is not None and not request.stream)
    if request.num_inference_steps is not None and not pictures:
        raise ConfigError("--num-inference-steps applies to pictures only. Possible: --prompt TEXT, or --report FILE.")
    return pictures


def _require_same_architecture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise ConfigError when two configs describe models whose layers cannot be compared."""
    for key in ("_class_name", "model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size"):
        named = before.get(key) is not None or key != "architectures"  # which a float model may leave out
        if named and before.get(key) != after.get(key):
            raise ConfigError(
                f"The two models differ in {key}: {before.get(key)} (float) and {after.get(key)} (quantized). "
                "Compare a quantized model with the float model that it was made from."
            )


def _is_quantized(folder: Path) -> bool:
    from quark.torch.model.model_folder import read_config

    return (folder / "config.json").is_file() and bool(read_config(folder).get("quantization_config"))
