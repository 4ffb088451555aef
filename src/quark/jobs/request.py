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


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What every command is told.

    Attributes:
        model: A folder, or a file.
        said: Names of the fields that somebody gave.
    """

    model: Path
    said: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class JobRequest(ModelRequest):
    """What may be asked for of either kind of model that is quantized; see the help texts."""

    output: str = option("", "Folder or file to make.", "--output", "-o", metavar="PATH", key="output.path",
                         changes_output=False, required=True)  # fmt: skip
    goal: str | None = option(
        None,
        f"Program that is to run the result: {', '.join(GOALS)}. It chooses scheme and format.",
        "--for",
        key="for",
    )
    effort: str | None = option(
        None, "With --for: fast, balanced (default with --calib) or best; which algorithms run, how long."
    )
    calib: Path | None = option(
        None,
        "Calibration data: text, JSON lines (.jsonl), datasets:NAME, a folder of images or audio, or arrays by name "
        "(.npz). Without them language models get a text of the package.",
        key="data.path",
    )
    samples: int | None = option(
        None, f"Most samples of --calib. Default {SAMPLES}; ONNX: all.", least=1, key="data.samples"
    )
    exclude: tuple[str, ...] | None = option(None, "Pattern of layers or nodes to keep in float; repeatable.")
    algorithm: tuple[str, ...] | None = option(
        None,
        "gptq, awq ..., or gptq:refine_passes=3,NAME=VALUE; `quark algorithms` lists them; repeatable.",
        key="algorithms",
    )
    write_recipe: Path | None = option(
        None, "Write what was asked for as a recipe, which `quark run` takes.", metavar="FILE", key=None
    )
    force: bool = option(False, "Replace the output.", "--force", key=None)
    report: Path | None = option(
        None, "Write a page (HTML) of what was found.", "--report", metavar="FILE", key="output.report",
        changes_output=False,
    )  # fmt: skip
    log_file: Path | None = option(
        None, "Write how far the work is as lines of JSON, after those of earlier runs.", "--log-file", metavar="FILE",
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
    """What may be asked for of a model folder."""

    length: int | None = option(
        None, f"Tokens in a sample of --calib. Default {LENGTH}.", "--length", least=1, key="data.length"
    )
    packing: bool | None = option(
        None,
        "Texts of --calib one after another, cut into windows (default), or a sample of each line or document.",
        "--packing/--no-packing",
        key="data.packing",
    )
    seed: int | None = option(
        None, "Take samples of all --calib by chance. Default: the first ones.", "--seed", least=0, key="data.seed"
    )
    synthetic: int | None = option(
        None, "Samples that the model itself writes, beside those of --calib.", "--synthetic", least=1,
        key="data.synthetic",
    )  # fmt: skip
    scheme: str | None = option(None, "Name of a scheme; `quark schemes` lists them.")
    bits: float | None = option(
        None,
        "In place of --scheme: bits for each weight, scales included; layers get schemes that lose least.",
        least=0,
    )
    size: str | None = option(
        None,
        "In place of --scheme: size of all tensors, as in 2.1GB, or a share of the model's, as in 30%; a tokenizer, in "
        "GGUF files too, comes on top. Layers get schemes that lose least.",
    )
    candidates: tuple[str, ...] | None = option(
        None, "Schemes that --bits and --size choose from, with commas or repeated."
    )
    sensitivity: Path | None = option(
        None, "File of what each layer loses: written, or read for another --bits or --size.", "--sensitivity"
    )
    layer: tuple[str, ...] | None = option(None, "PATTERN=SCHEME for some layers; repeatable.", key="layers")
    component: tuple[str, ...] | None = option(
        None,
        "Of a pipeline of diffusers: NAME in place of what it calls once a step, or NAME=SCHEME beside that, as in "
        "text_encoder=int8_wo; repeatable.",
        key="components",
    )
    imatrix: Path | None = option(None, "Importance matrix of llama.cpp, which weighs the errors of a GGUF mix.")
    save_imatrix: Path | None = option(
        None, "Write the importance matrix of --calib: NAME.gguf, or the older NAME.dat.", key="output.save_imatrix",
        changes_output=False,
    )  # fmt: skip
    kv_cache: str | None = option(None, "Quantize the key and value cache: fp8, int8, fp8_per_head, int8_per_head.")
    attention: str | None = option(None, "Quantize queries and attention probabilities: fp8.")
    calibrate_all_experts: bool = option(
        False, "Calibrate each expert of a mixture by all tokens, not by its own.", "--calibrate-all-experts"
    )
    device: str = option("cpu", "cpu, cuda, cuda:1 ...")
    dtype: str = option("auto", "Compute in float32, float16, bfloat16; auto: as stored.")
    export_format: str | None = option(
        None,
        f"quark (default), {', '.join(FOLDER_FORMS[1:])}; {', '.join(FILE_FORMS)} (a file). Default for -o X.gguf: "
        "gguf; for -o X.safetensors: comfyui.",
        "--export-format",
        "--format",
        key="output.format",
    )
    weight_format: str = option("real_quantized", "real_quantized or fake_quantized.", key="output.weight_format")
    pack_method: str = option("reorder", "Order of 4-bit codes: reorder or order.", key="output.pack_method")
    max_shard_size: str = option("5GB", "Largest safetensors file.", key="output.max_shard_size")
    stream: bool | None = option(
        None,
        "Load, quantize and write one block at a time; a killed run goes on. Default: where memory is too small, and "
        "tensor by tensor where no data are needed.",
        changes_output=False,
    )
    trust_remote_code: bool = option(
        False, "Run the code that the folder brings along.", "--trust-remote-code", key=None
    )
    keep_unexpected: bool = option(
        False,
        "Accept tensors that the class of the model does not use; they are copied as they are.",
        "--keep-unexpected",
    )

    @property
    def load(self) -> Loading:
        """How its model is loaded."""
        return Loading(self.device, self.dtype, self.trust_remote_code, self.keep_unexpected)


@dataclass(frozen=True, kw_only=True)
class FileRequest(JobRequest):
    """What may be asked for of an ONNX file."""

    # With a goal these say of either kind of model what it is to be.
    scheme: str | None = option(None, "With --for: a configuration, or a family of them.")
    bits: float | None = option(None, "With --for: bits of a weight.", least=0)

    config: str | None = option(
        None,
        "Named configuration: A8W8, XINT8 ... Default: for ONNX Runtime on this CPU, the best found in a minute.",
    )
    target: str | None = option(
        None,
        "Layout to write: npu, ort_x64, ort_arm64, openvino, generic. --for chooses it, and the configuration too.",
    )
    statistics: Path | None = option(None, "File of calibration statistics, written or reused.")
    batch_size: int | None = option(None, "Rows of --calib in a sample.", least=1, key="data.batch_size")
    mean: str | None = option(None, "Of images: (image / 255 - mean) / std, as in 0.5 or 0.4,0.5,0.6.", key="data.mean")
    std: str | None = option(None, "Of images, with --mean.", key="data.std")
    allow_noop: bool | None = option(
        None,
        "Whether an algorithm that finds nothing to do is a warning (default) or an error.",
        "--allow-noop/--no-allow-noop",
    )
    allow_damage: bool = option(False, "Write a model that lost its outputs on calibration samples.", "--allow-damage")
    recover: bool = option(
        False, "Try other ranges and algorithms; keep what helps on samples that are held out.", "--recover"
    )
    budget: str | None = option(None, "Time for --recover: 90s, 10m (default), 1h ...")
    metric: str | None = option(None, "Of --recover: sqnr (default), psnr, cosine or l2.")
    reach: float | None = option(None, "Of --recover: the metric that is enough, as in 30 (dB of sqnr).")
    measure: bool | None = option(
        None,
        "Time the kernels of this processor, and leave in float what is faster so; for --target ort_x64.",
        "--measure/--no-measure",
    )
    profile: Path | None = option(None, "File of these times, written or reused; with --measure.")
    allow_wider: bool = option(False, "Of --recover: more bits than the config asks for.", "--allow-wider")


WITH_A_GOAL = ("scheme", "bits")
"""Fields that are of an ONNX file only beside a goal."""
A = TypeVar("A", bound=ModelRequest)
B = TypeVar("B", bound=ModelRequest)
Kinds: TypeAlias = tuple[type[A], type[B]]
"""The requests of a command: of a model folder, and of an ONNX file."""
QUANTIZE: Kinds[FolderRequest, FileRequest] = (FolderRequest, FileRequest)


def is_adapter(model: Path) -> bool:
    """Whether a folder is an adapter of PEFT, which has the weights of no whole model."""
    return (model / "adapter_config.json").is_file() and not (model / "config.json").is_file()


PIPELINE = "model_index.json"
"""Of a folder: that it is a pipeline of diffusers, whose components are folders in it."""


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is that of a pipeline of diffusers."""
    return (folder / PIPELINE).is_file()


def is_onnx(model: Path) -> bool:
    """Whether the model is an ONNX file, by its name."""
    return model.suffix.lower() == ".onnx"


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
    if of_folders and of_files and name not in WITH_A_GOAL:
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
    allowed = own.keys() - ({*WITH_A_GOAL} if kind is FileRequest and "goal" not in said else {})
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
