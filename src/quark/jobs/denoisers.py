"""Denoisers of image and video models, written as one file for ComfyUI: a folder of diffusers, or a safetensors file.

Without data, weights alone are read, a tensor at a time, and no class is loaded. With recorded steps the network of a
folder is in memory: its static scales are found, and algorithms run, on the layers that the file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quark.base.files import check_apart, check_file
from quark.base.json_objects import plain_json
from quark.base.log import logger
from quark.errors import CalibrationError, ConfigError, FormatError, NotSupportedError, OutputError
from quark.jobs.configure_folder import DEFAULT_ALGORITHM
from quark.jobs.folders.calibration import Calibration
from quark.jobs.folders.job import RECORDED, FolderJob
from quark.jobs.folders.pipeline import data_of
from quark.jobs.folders.schemes import layer_rules
from quark.jobs.options import flag_of
from quark.jobs.request import FolderRequest, Loading, is_pipeline, options_of
from quark.jobs.words import COMFYUI, GGUF, split_algorithm, torch_algorithms

TAKEN = frozenset({
    "output", "goal", "effort", "scheme", "bits", "exclude", "layer", "force", "write_recipe", "log_file",
    "export_format", "device", "dtype", "calib", "samples", "algorithm",
})  # fmt: skip
"""The options that a denoiser takes."""
_WITHOUT_PLACE = {"svdquant": "low-rank branches", "quarot": "rotations of inputs", "rotation": "rotations of inputs"}
"""Algorithm -> what of it a file for ComfyUI cannot say."""
SUFFIXES = {COMFYUI: ".safetensors", GGUF: ".gguf"}


def is_denoiser_file(path: Path) -> bool:
    """Return True where a path names one safetensors file."""
    return path.suffix == ".safetensors"


def holds_denoiser(path: Path) -> bool:
    """Return True where a path is a safetensors file, or a folder of diffusers: of a model, or of a pipeline."""
    if is_denoiser_file(path) or is_pipeline(path):
        return True
    try:
        found = plain_json((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # which the reader of the folder says
        return False
    from quark.torch.diffusion.component import is_component

    return isinstance(found, dict) and is_component(found)


def is_for_comfyui(job: FolderJob) -> bool:
    """Return True where a job writes a file for ComfyUI. Raises NotSupportedError for a model that has no such file."""
    model = job.request.model
    if job.form not in SUFFIXES:
        if is_denoiser_file(model):
            raise NotSupportedError(
                f"{model} is a file, and becomes one. Possible: --for comfyui, --export-format {' or '.join(SUFFIXES)}."
            )
        return False
    found = holds_denoiser(model)
    if job.form == COMFYUI and not found:
        raise NotSupportedError(
            f"{model} is no denoiser of an image or video model, which a file for ComfyUI holds. Possible: a folder of "
            "diffusers, or a safetensors file with the names of the authors."
        )
    return found


@dataclass(frozen=True)
class DenoiserJob:
    """A job for a denoiser that is ready to run.

    Attributes:
        source: A `DenoiserSource`.
        scheme: Its name.
        plan: Name of a layer -> `PlannedLayer`.
        file: The file to make; empty where none is asked for.
        write: Writes it.
        lacks: What needs calibration data, where none are given; None: nothing does.
    """

    source: Any
    scheme: str
    plan: Mapping[str, Any]
    file: Path
    write: partial[None]
    lacks: str | None = None

    def check_data(self) -> None:
        """Raise CalibrationError where data are needed, and not given."""
        if self.lacks is not None:
            raise CalibrationError(f"{self.lacks[0].upper()}{self.lacks[1:]} needs data: pass --calib, {RECORDED}.")

    def rows(self) -> list[tuple[str, str, int]]:
        """Scheme or block type, layers, values, for a table; the first has most values."""
        found: dict[str, tuple[int, int]] = {}
        for layer in self.plan.values():
            layers, values = found.get(str(layer.what), (0, 0))
            found[str(layer.what)] = (layers + 1, values + layer.shape[0] * layer.shape[1])
        return sorted(((what, str(n), values) for what, (n, values) in found.items()), key=lambda row: -row[2])


def configure_denoiser(job: FolderJob) -> DenoiserJob:
    """The plan of a denoiser: reads headers alone.

    Raises:
        QuarkError: What is asked for does not go together, or does not fit the model.
    """
    from quark.core.schemes import SCHEMES
    from quark.torch.writers.comfyui.plan import plan_blocks, plan_scaled
    from quark.torch.writers.comfyui.scaled_layers import is_static
    from quark.torch.writers.comfyui.source import open_denoiser
    from quark.torch.writers.comfyui.write import write_scaled
    from quark.torch.writers.gguf.of_denoiser import write_denoiser

    request = job.request
    scheme, algorithms = _scheme(job), _algorithms(job)
    file = _file(job) if "output" in request.said else Path()
    source = open_denoiser(request.model)
    if not source.tensors:
        raise FormatError(f"{request.model} holds no tensors.")
    exclude, rules = request.exclude or (), layer_rules(request.layer)
    plan: Mapping[str, Any]
    if job.form == GGUF:
        plan = plan_blocks(source, scheme, exclude, rules)
    else:
        plan = plan_scaled(source, SCHEMES[scheme], exclude, {at: SCHEMES[name] for at, name in rules.items()})
    reads = _reads_data(plan, algorithms)
    _check_data(request, source, reads)
    write: partial[None]
    if job.form == GGUF:
        write = partial(write_denoiser, source, scheme, plan)
    else:
        write = partial(write_scaled, source, plan)
    if request.calib is not None:
        write = partial(_write_solved, request, source, plan, algorithms, write)
    # Without data, ComfyUI finds the scales of scales itself, where none are stored.
    static = any(not isinstance(layer.what, str) and is_static(layer.what) for layer in plan.values())
    needed = request.calib is None and (static or _reads_data({}, algorithms) is not None)
    return DenoiserJob(source, scheme, plan, file, write, reads if needed else None)


def _scheme(job: FolderJob) -> str:
    """The scheme. Raises ConfigError for what does not apply to a denoiser, or where there is no scheme."""
    request, choice = job.request, job.choice
    if choice is not None:
        logger.info("%s", choice)
    known = options_of(FolderRequest)
    others = [flag_of(known[name]) for name in known if name in request.said - TAKEN]
    if others:
        raise ConfigError(
            f"{', '.join(others)}: not of a file for ComfyUI. Possible: "
            f"{', '.join(flag_of(known[name]) for name in known if name in TAKEN)}."
        )
    if request.dtype != "auto" or (request.device != "cpu" and request.calib is None):
        raise ConfigError(
            "--device and --dtype: a file for ComfyUI is made of the weights as stored, without data on the CPU."
        )
    scheme = choice.scheme if choice is not None else request.scheme
    if scheme is None:
        raise ConfigError(f"Missing option --scheme or --for, which {request.model} needs.")
    return scheme


def _algorithms(job: FolderJob) -> list[Any]:
    """The configs of the algorithms. Raises NotSupportedError for one whose result a file has no place for."""
    from quark.torch.config.named_algorithms import algo_config_by_name

    asked = job.choice.algorithms if job.choice is not None else job.request.algorithm
    if asked is None and job.form == GGUF and job.request.calib is not None:
        asked = (DEFAULT_ALGORITHM,)
    for word in asked or ():
        if (name := split_algorithm(word)[0]) in _WITHOUT_PLACE:
            raise NotSupportedError(
                f"--algorithm {name}: a file for ComfyUI has no place for {_WITHOUT_PLACE[name]}. Possible: gptq, awq, "
                "smooth, autoround ...; or a folder for diffusers (--for diffusers)."
            )
    return [algo_config_by_name(each) if isinstance(each, str) else each for each in torch_algorithms(asked)]


def _reads_data(plan: Mapping[str, Any], algorithms: list[Any]) -> str | None:
    """Return the part of a job that reads calibration data; None where nothing does."""
    from quark.torch.algorithms import algorithms_of

    scaled = [layer.what for layer in plan.values() if not isinstance(layer.what, str) and layer.what.needs_data]
    reading = [each.name for each in algorithms_of(algorithms) if each.reads_inputs or each.learns]
    if reading:
        return f"the algorithm {reading[0]!r}"
    return f"the scale of inputs ({scaled[0].input})" if scaled else None


def _check_data(request: FolderRequest, source: Any, reads: str | None) -> None:
    """Raise for data that nothing reads, or that no class is known for."""
    if request.calib is None:
        if request.samples is not None:
            raise ConfigError("--samples describes calibration data, but none are given. Possible: --calib.")
        return
    if source.folder is None:
        raise NotSupportedError(
            f"--calib: {request.model} is a file, which names no class that could run. Possible: the folder of "
            "diffusers; or no data."
        )
    if reads is None:
        raise ConfigError(
            f"--calib {request.calib}: nothing reads it, as these are weights alone. Possible: --scheme fp8 or nvfp4, "
            "which give inputs a scale, --algorithm gptq ..., or no data."
        )


def _write_solved(
    request: FolderRequest, source: Any, plan: Mapping[str, Any], algorithms: list[Any], write: partial[None],
    file: Path, overwrite: bool,
) -> None:  # fmt: skip
    """Write the file of a network that is calibrated, and solved by algorithms."""
    from quark.jobs.folders.models import inputs_of, load_model, open_folder
    from quark.torch import ModelQuantizer
    from quark.torch.writers.comfyui.solved import SolvedDenoiser, config_for, join_layers

    model = load_model(open_folder(source.folder), Loading(request.device))
    steps = data_of(request.calib, source.folder.name)
    data = replace(Calibration.of(request), path=steps).read(inputs_of(source.folder, model))
    names = join_layers(model, plan)
    quantized = ModelQuantizer(config_for(names, plan, algorithms or None)).quantize_as_planned(model, data)
    write(file, overwrite, solved=SolvedDenoiser.of(quantized, names))


def _file(job: FolderJob) -> Path:
    request, suffix = job.request, SUFFIXES[job.form]
    file = Path(request.output)
    if file.suffix != suffix:
        raise OutputError(f"--output {request.output}: the file is called NAME{suffix}. Possible: {file}{suffix}.")
    check_apart(file, request.model)
    check_apart(file, request.calib)
    check_file(file, request.force)
    return file
