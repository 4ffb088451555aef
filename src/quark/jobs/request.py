"""Request: what was asked for, as one object: of the command line, of a recipe or of a Python call.

A field is an option: its name here is the keyword in Python, and its help text stands here only. `said` names the
fields that somebody gave; all others have their defaults. A command has a pair of requests, of model folders and of
ONNX files: what is in both is of either kind of model. Here is the pair of `quark quantize`; those of other commands
stand beside what is done for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from quark.errors import ConfigError, UsageError, did_you_mean
from quark.goals import GOALS
from quark.jobs.options import FOR_FILES, FOR_FOLDERS, flag_of, option, option_of
from quark.jobs.words import FILE_FORMS, FOLDER_FORMS

SAMPLES, LENGTH = 128, 512
"""Most calibration samples, and tokens in one of text, where nothing else is asked for."""
SAMPLES_OF_PACKAGE = 32
"""Most samples of the text of the package: its prose, dialogue and code, which come before pages about quark."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The request of every command.

    Attributes:
        model: A folder, or a file.
        said: Names of the fields that somebody gave.
    """

    model: Path
    said: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class JobRequest(ModelRequest):
    """Options of either kind of model that is quantized; see the help texts."""

    output: str = option("", "Folder or file to write.", "--output", "-o", metavar="PATH", key="output.path",
                         changes_output=False, required=True)  # fmt: skip
    goal: str | None = option(
        None,
        f"Program that will run the result: {', '.join(GOALS)}. It chooses scheme and format.",
        "--for",
        key="for",
    )
    effort: str | None = option(
        None,
        "With --for: time to spend on accuracy: fast, balanced or best. Default: balanced with --calib, and for "
        "language models if it takes less than ten minutes; else fast.",
    )
    calib: Path | None = option(
        None,
        "Calibration data: text, JSON lines (.jsonl), datasets:NAME, a folder of images or audio, or named arrays "
        "(.npz). Default for language models: a text of the package.",
        key="data.path",
    )
    samples: int | None = option(
        None,
        f"Number of calibration samples. Default: {SAMPLES}; of the text of the package: {SAMPLES_OF_PACKAGE}; ONNX: "
        "all.",
        least=1,
        key="data.samples",
    )
    exclude: tuple[str, ...] | None = option(
        None,
        "Layers or nodes that stay in float: a name, a glob such as *.down_proj, or re: and a regular expression of "
        "whole names; repeatable.",
    )
    algorithm: tuple[str, ...] | None = option(
        None,
        "Algorithm, such as gptq or gptq:refine_passes=3,NAME=VALUE; `quark algorithms` lists them; repeatable.",
        key="algorithms",
    )
    write_recipe: Path | None = option(None, "Write the options as a recipe for `quark run`.", metavar="FILE", key=None)
    force: bool = option(False, "Replace an existing output.", "--force", key=None)
    report: Path | None = option(
        None, "Write the results as an HTML page.", "--report", metavar="FILE", key="output.report",
        changes_output=False,
    )  # fmt: skip
    log_file: Path | None = option(
        None, "Append the progress of the job as lines of JSON.", "--log-file", metavar="FILE",
        changes_output=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Loading:
    """How the model of a folder is loaded: where to, in which type, and whether more is accepted than by itself."""

    device: str = "cpu"
    dtype: str = "auto"
    trust_remote_code: bool = False
    keep_unexpected: bool = False


AS_STORED = Loading()


@dataclass(frozen=True, kw_only=True)
class FolderRequest(JobRequest):
    """Options of a model folder."""

    length: int | None = option(
        None, f"Tokens in a sample of --calib. Default {LENGTH}.", "--length", least=1, key="data.length"
    )
    packing: bool | None = option(
        None,
        "Join the texts of --calib and cut them into windows (default), or make a sample of each line or document.",
        "--packing/--no-packing",
        key="data.packing",
    )
    seed: int | None = option(
        None,
        "Choose random samples of --calib, with this seed. Default: the first ones.",
        "--seed",
        least=0,
        key="data.seed",
    )
    synthetic: int | None = option(
        None, "Number of samples that the model generates, in addition to those of --calib.", "--synthetic", least=1,
        key="data.synthetic",
    )  # fmt: skip
    scheme: str | None = option(None, "Name of a scheme; `quark schemes` lists them.")
    bits: float | None = option(
        None,
        "Instead of --scheme: average bits per weight, scales included; chooses a scheme for each layer.",
        least=0,
    )
    size: str | None = option(
        None,
        "Instead of --scheme: size of all tensors, such as 2.1GB, or a share of the model's size, such as 30%, without "
        "the tokenizer; chooses a scheme for each layer.",
    )
    candidates: tuple[str, ...] | None = option(
        None, "Schemes that --bits and --size choose from; separated by commas, or repeated."
    )
    sensitivity: Path | None = option(
        None, "File with the loss of each layer; written, or read again for another --bits or --size.", "--sensitivity"
    )
    layer: tuple[str, ...] | None = option(None, "Scheme for some layers, as PATTERN=SCHEME; repeatable.", key="layers")
    component: tuple[str, ...] | None = option(
        None,
        "For a pipeline of diffusers: NAME quantizes this component instead of the denoiser; NAME=SCHEME, such as "
        "text_encoder=int8_wo, quantizes it too; repeatable.",
        key="components",
    )
    imatrix: Path | None = option(None, "Importance matrix of llama.cpp, which weights the errors of a GGUF mix.")
    save_imatrix: Path | None = option(
        None,
        "Write the importance matrix of --calib to NAME.gguf, or in the older form to NAME.dat.",
        key="output.save_imatrix",
        changes_output=False,
    )
    kv_cache: str | None = option(None, "Quantize the key and value cache: fp8, int8, fp8_per_head, int8_per_head.")
    attention: str | None = option(None, "Quantize queries and attention probabilities: fp8.")
    calibrate_all_experts: bool = option(
        False,
        "Calibrate each expert of a mixture with all tokens, not only with those routed to it.",
        "--calibrate-all-experts",
    )
    device: str = option("cpu", "Device to compute on: cpu, cuda, cuda:1 ...")
    dtype: str = option("auto", "Type to compute in: float32, float16, bfloat16, or auto for the type of the files.")
    export_format: str | None = option(
        None,
        f"Format: quark (default), {', '.join(FOLDER_FORMS[1:])}; for one file {', '.join(FILE_FORMS)}. Default for -o "
        "X.gguf: gguf; for -o X.safetensors: comfyui.",
        "--export-format",
        "--format",
        key="output.format",
    )
    weight_format: str = option(
        "real_quantized",
        "real_quantized stores codes and scales; fake_quantized stores float values.",
        key="output.weight_format",
    )
    pack_method: str = option("reorder", "Order of 4-bit codes: reorder or order.", key="output.pack_method")
    max_shard_size: str = option("5GB", "Largest size of a safetensors file.", key="output.max_shard_size")
    stream: bool | None = option(
        None,
        "Load, quantize and write one block at a time; a killed run can continue. Default: if memory is too small; "
        "if no data are needed, one tensor at a time.",
        changes_output=False,
    )
    trust_remote_code: bool = option(False, "Run Python code from the model folder.", "--trust-remote-code", key=None)
    keep_unexpected: bool = option(
        False,
        "Accept tensors that the model class does not use, and copy them unchanged.",
        "--keep-unexpected",
    )
    verdict: bool | None = option(
        None,
        "Say at the end what the quantization cost, on held-out data. Default: yes, if it takes less than 20 s or a "
        "fifth of the job.",
        key="evaluation.verdict",
        changes_output=False,
    )
    max_kl: float | None = option(
        None,
        "Largest mean KL divergence from the float model, in nats; above it nothing is written, and the exit code is "
        "1.",
        least=0,
        key="evaluation.max_kl",
        changes_output=False,
    )
    max_perplexity: float | None = option(
        None, "Largest rise of the perplexity in percent, likewise.", least=0, key="evaluation.max_perplexity",
        changes_output=False,
    )  # fmt: skip
    min_agreement: float | None = option(
        None,
        "Smallest share of tokens for which both models have the same first choice, such as 0.9 or 90, likewise.",
        least=0,
        key="evaluation.min_agreement",
        changes_output=False,
    )
    keep_anyway: bool = option(
        False, "Write the output even if it is outside of --max-kl, --max-perplexity or --min-agreement; the exit code "
        "is 1.", "--keep-anyway", key="evaluation.keep_anyway", changes_output=False,
    )  # fmt: skip
    process_timeout: float | None = option(
        None,
        "Under torchrun: seconds that a process waits for another before it ends with an error. Default: 600.",
        least=1,
        key=None,
        changes_output=False,
    )

    @property
    def load(self) -> Loading:
        """How its model is loaded."""
        return Loading(self.device, self.dtype, self.trust_remote_code, self.keep_unexpected)


@dataclass(frozen=True, kw_only=True)
class FileRequest(JobRequest):
    """Options of an ONNX file."""

    # With a goal these say of either kind of model what it is to be.
    scheme: str | None = option(None, "With --for: a configuration, or a family of configurations.")
    bits: float | None = option(None, "With --for: bits per weight.", least=0)

    config: str | None = option(
        None,
        "Named configuration: A8W8, XINT8 ... Default: the best for ONNX Runtime on this CPU, searched for a minute.",
    )
    target: str | None = option(
        None,
        "Runtime that the Q/DQ nodes are placed for: npu, ort_x64, ort_arm64, openvino, generic. --for chooses it too.",
    )
    statistics: Path | None = option(None, "File with calibration statistics; written, or reused if it exists.")
    batch_size: int | None = option(None, "Rows of the data in a sample.", least=1, key="data.batch_size")
    mean: str | None = option(
        None,
        "For images: the mean in (image / 255 - mean) / std, such as 0.5 or 0.4,0.5,0.6. Default of this and the next "
        "four: what the model, or a file beside it, says.",
        key="data.mean",
    )
    std: str | None = option(None, "For images: the std in (image / 255 - mean) / std.", key="data.std")
    pixel_max: int | None = option(
        None,
        "For images: the value of a white pixel before mean and std, 1 (default) or 255. 255 alone leaves pixels as "
        "they are.",
        key="data.pixel_max",
    )
    colours: str | None = option(
        None, "For images: the order of the colours, rgb (default) or bgr.", key="data.colours"
    )
    resize: str | None = option(
        None,
        "For images of another size than the input: stretch, crop (cover, then the middle) or pad (fit, with grey "
        "around); :HEIGHTxWIDTH after it if the model leaves its size open. More with commas: scale=256 (crop: scale "
        "the shorter side to that before), filter=bicubic, fill=0, corner.",
        key="data.resize",
    )
    allow_noop: bool | None = option(
        None,
        "Only warn if an algorithm has no effect (default), or raise an error.",
        "--allow-noop/--no-allow-noop",
    )
    allow_damage: bool = option(
        False, "Write the model even if it lost its outputs on calibration samples.", "--allow-damage"
    )
    recover: bool = option(
        False, "Try other ranges and algorithms, and keep those that help on held-out samples.", "--recover"
    )
    budget: str | None = option(None, "With --recover: time for the search, such as 90s, 10m (default) or 1h.")
    metric: str | None = option(None, "With --recover: metric of the outputs: sqnr (default), psnr, cosine or l2.")
    reach: float | None = option(
        None, "With --recover: value of the metric at which the search ends, such as 30 (dB of sqnr)."
    )
    measure: bool | None = option(
        None,
        "Measure the kernels of this processor, and leave nodes in float that are faster so; for --target ort_x64.",
        "--measure/--no-measure",
    )
    profile: Path | None = option(None, "With --measure: file with the times; written, or reused if it exists.")
    allow_wider: bool = option(False, "With --recover: allow more bits than the configuration has.", "--allow-wider")
    prefer: str | None = option(
        None,
        "Without --config: which of the files that were made is written if the task does not suffer: the one with the "
        "shortest time (speed), the highest SQNR (accuracy) or the fewest bytes (size). Default: between.",
    )


_WITH_A_GOAL = ("scheme", "bits")
"""Fields that are of an ONNX file only beside a goal."""
A = TypeVar("A", bound=ModelRequest)
B = TypeVar("B", bound=ModelRequest)
Kinds: TypeAlias = tuple[type[A], type[B]]
"""The requests of a command: of a model folder, and of an ONNX file."""
QUANTIZE: Kinds[FolderRequest, FileRequest] = (FolderRequest, FileRequest)


def is_adapter(model: Path) -> bool:
    """Return True where a folder is an adapter of PEFT, which has the weights of no whole model."""
    return (model / "adapter_config.json").is_file() and not (model / "config.json").is_file()


PIPELINE = "model_index.json"
"""Of a folder: that it is a pipeline of diffusers, whose components are folders in it."""


def is_pipeline(folder: Path) -> bool:
    """Return True where a folder is that of a pipeline of diffusers."""
    return (folder / PIPELINE).is_file()


def is_onnx(model: Path) -> bool:
    """Return True where the model is an ONNX file, by its name."""
    return model.suffix.lower() == ".onnx"


def is_gguf(model: Path) -> bool:
    """Return True where the model is a GGUF file, by its name."""
    return model.suffix.lower() == ".gguf" and not model.is_dir()


def is_tensor_file(model: Path) -> bool:
    """Return True where the model is one safetensors file, by its name."""
    return model.suffix.lower() == ".safetensors" and not model.is_dir()


def options_of(*kinds: type[ModelRequest]) -> dict[str, Field[Any]]:
    """The fields that are options by their names, in the order of the help; of `QUANTIZE` where none is named."""
    known: dict[str, Field[Any]] = {}
    for kind in kinds or QUANTIZE:
        for each in fields(kind):
            if "option" in each.metadata:
                known.setdefault(each.name, each)
    return known


def panel_of(name: str, kinds: Kinds[Any, Any] = QUANTIZE) -> str | None:
    """To which kind of model an option belongs; None: to both."""
    of_folders, of_files = (name in options_of(kind) for kind in kinds)
    if of_folders and of_files and name not in _WITH_A_GOAL:
        return None
    return FOR_FOLDERS if of_folders else FOR_FILES


def request_for(kinds: Kinds[A, B], model: str | os.PathLike[str], given: Mapping[str, Any], **places: Path) -> A | B:
    """The request for a model, of the kind that its path says.

    Args:
        kinds: The requests of a command.
        model: A folder, or an ONNX file.
        given: Name of a field -> what was said. None says nothing.
        places: Of further models, by the names of their fields.

    Raises:
        ConfigError: There is no such field, or the value is none for it.
        UsageError: The field is of the other kind of model.
    """
    path = Path(model)
    kind: type[A] | type[B] = kinds[is_onnx(path)]
    own, known = options_of(kind), options_of(*kinds)
    for name in given:
        if name not in known:
            raise ConfigError(f"There is no option {name!r}. {did_you_mean(name, known)}")
    said = {name: _as_field(known[name], value) for name, value in given.items() if value is not None}
    allowed = own.keys() - ({*_WITH_A_GOAL} if kind is FileRequest and "goal" not in said else {})
    for name in known:
        if name in said and name not in allowed:
            raise _does_not_apply(kinds, name, path)
    return kind(model=path, said=frozenset(said), **said, **places)


request_of = partial(request_for, QUANTIZE)
"""The request to quantize a model."""


def _does_not_apply(kinds: Kinds[Any, Any], name: str, path: Path) -> UsageError:
    known, mine = options_of(*kinds), FOR_FILES if is_onnx(path) else FOR_FOLDERS
    panel = panel_of(name, kinds) or ""
    return UsageError(
        f"{flag_of(known[name])} does not apply to {path}: it is {panel[0].lower()}{panel[1:]}. Possible here: "
        f"{', '.join(flag_of(each) for each in known.values() if panel_of(each.name, kinds) == mine)}."
    )


def _as_field(each: Field[Any], value: Any) -> Any:
    """A value as a field holds it: several as a tuple, places as paths. Raises ConfigError for another kind."""
    kind, least = str(each.type), option_of(each).least
    if kind.startswith("tuple"):
        value = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else value
        fits = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    elif kind.startswith("Path"):
        value = Path(value) if isinstance(value, (str, os.PathLike)) else value
        fits = isinstance(value, Path)
    else:
        name = kind.partition(" ")[0]
        kinds = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}[name]
        fits = isinstance(value, kinds) and (name == "bool" or not isinstance(value, bool))
    if not fits or (least is not None and not value >= least):
        wanted = kind.removesuffix(" | None").replace("tuple[str, ...]", "one text, or several")
        bound = f" of {least:g} or more" if least is not None else ""
        raise ConfigError(f"{flag_of(each)} {value!r:.60} is none: it takes {wanted}{bound}.")
    return value
