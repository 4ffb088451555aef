"""Denoisers of image and video models, written as one file for ComfyUI: a folder of diffusers, or a safetensors file.

Weights alone are read, a tensor at a time; no class is loaded. What a model in memory would be needed for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quark.base.files import check_apart, check_file
from quark.base.json_objects import plain_json
from quark.errors import ConfigError, FormatError, NotSupportedError, OutputError
from quark.jobs.folders.schemes import layer_rules
from quark.jobs.options import flag_of
from quark.jobs.request import FolderRequest, is_pipeline, options_of
from quark.jobs.resolve import FolderJob
from quark.jobs.words import COMFYUI, GGUF

TAKEN = frozenset({
    "output", "goal", "effort", "scheme", "bits", "exclude", "layer", "force", "write_recipe", "log_file",
    "export_format", "device", "dtype",
})  # fmt: skip
"""What may be said of a denoiser."""
SUFFIXES = {COMFYUI: ".safetensors", GGUF: ".gguf"}


def is_denoiser_file(path: Path) -> bool:
    """Whether a path names one safetensors file."""
    return path.suffix == ".safetensors"


def holds_denoiser(path: Path) -> bool:
    """Whether a path is a safetensors file, or a folder of diffusers: of a model, or of a pipeline."""
    if is_denoiser_file(path) or is_pipeline(path):
        return True
    try:
        found = plain_json((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # which the reader of the folder says
        return False
    from quark.torch.diffusion.component import is_component

    return isinstance(found, dict) and is_component(found)


def is_for_comfyui(job: FolderJob) -> bool:
    """Whether a job writes a file for ComfyUI. Raises NotSupportedError for a model that has no such file."""
    found = holds_denoiser(job.request.model)
    if job.form == COMFYUI and not found:
        raise NotSupportedError(
            f"{job.request.model} is no denoiser of an image or video model, which a file for ComfyUI holds. Possible: "
            "a folder of diffusers, or a safetensors file with the names of the authors."
        )
    if is_denoiser_file(job.request.model) and job.form not in SUFFIXES:
        raise NotSupportedError(
            f"{job.request.model} is a file, and becomes one. Possible: --for comfyui, --export-format "
            f"{' or '.join(SUFFIXES)}."
        )
    return found and job.form in SUFFIXES


@dataclass(frozen=True)
class DenoiserJob:
    """What is done for a denoiser.

    Attributes:
        source: A `DenoiserSource`.
        scheme: Its name.
        plan: Name of a layer -> `PlannedLayer`.
        file: The file to make; empty where none is asked for.
        write: Writes it.
    """

    source: Any
    scheme: str
    plan: Mapping[str, Any]
    file: Path
    write: partial[None]

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
    from quark.torch.writers.comfyui.source import open_denoiser
    from quark.torch.writers.comfyui.write import plan_blocks, plan_scaled, write_scaled
    from quark.torch.writers.gguf.of_denoiser import write_denoiser

    request = job.request
    scheme = _scheme(job)
    file = _file(job) if "output" in request.said else Path()
    source = open_denoiser(request.model)
    if not source.tensors:
        raise FormatError(f"{request.model} holds no tensors.")
    exclude, rules = request.exclude or (), layer_rules(request.layer)
    if job.form == GGUF:
        plan = plan_blocks(source, scheme, exclude, rules)
        return DenoiserJob(source, scheme, plan, file, partial(write_denoiser, source, scheme, plan))
    plan = plan_scaled(source, SCHEMES[scheme], exclude, {pattern: SCHEMES[name] for pattern, name in rules.items()})
    return DenoiserJob(source, scheme, plan, file, partial(write_scaled, source, plan))


def _scheme(job: FolderJob) -> str:
    """The scheme. Raises ConfigError for what does not apply to a denoiser, or where there is no scheme."""
    request, choice = job.request, job.choice
    known = options_of(FolderRequest)
    others = [flag_of(known[name]) for name in known if name in request.said - TAKEN]
    if others or (choice is not None and choice.algorithms):
        said = ", ".join(others) or f"--effort {request.effort}"
        raise ConfigError(
            f"{said}: a file for ComfyUI is made of the weights alone, without data or algorithms. Possible: "
            f"{', '.join(flag_of(known[name]) for name in known if name in TAKEN)}."
        )
    if (request.device, request.dtype) != ("cpu", "auto"):
        raise ConfigError("--device and --dtype: a file for ComfyUI is made on the CPU, of the weights as stored.")
    scheme = choice.scheme if choice is not None else request.scheme
    if scheme is None:
        raise ConfigError(f"Missing option --scheme or --for, which {request.model} needs.")
    return scheme


def _file(job: FolderJob) -> Path:
    request, suffix = job.request, SUFFIXES[job.form]
    file = Path(request.output)
    if file.suffix != suffix:
        raise OutputError(f"--output {request.output}: the file is called NAME{suffix}. Possible: {file}{suffix}.")
    check_apart(file, request.model)
    check_file(file, request.force)
    return file
