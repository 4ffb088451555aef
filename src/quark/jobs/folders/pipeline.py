"""A pipeline of diffusers: model_index.json names its components, each a folder beside it. Some become quantized ones.

model_index.json    {"_class_name": ..., "transformer": ["diffusers", "SD3Transformer2DModel"], ...}
transformer/        quantized, as a folder of a network alone is
text_encoder/       a folder of transformers: quantized where it is asked for, else copied
vae/ scheduler/ ... copied, byte by byte
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quark.base.log import logger
from quark.base.memory_and_disk import check_disk
from quark.errors import ConfigError, FormatError, did_you_mean
from quark.jobs.request import PIPELINE, FolderRequest
from quark.jobs.words import check_words

_OF_ONE = ("save_imatrix", "imatrix", "sensitivity", "size")
"""Options that say something of one model."""
_OF_DENOISERS = frozenset({
    "goal", "effort", "calib", "samples", "exclude", "algorithm", "length", "packing", "seed", "synthetic", "bits",
    "candidates", "layer", "kv_cache", "attention", "calibrate_all_experts", "stream",
})  # fmt: skip
"""Options that a component with a scheme of its own does not get."""
_OF_DATA = frozenset({"calib", "samples", "algorithm"})
"""Of these, those that it gets where its own data are."""
BESIDE = 64 << 20
"""Most bytes of a file beside model_index.json that is copied: whole models in one file are not read from there."""


def denoisers(folder: Path) -> list[str]:
    """The components that a pipeline calls once a step. Raises FormatError where a class of theirs is not known."""
    from quark.torch.diffusion.component import CLASS, is_component
    from quark.torch.diffusion.network import is_denoiser, network_class
    from quark.torch.model.folder_files import components
    from quark.torch.model.model_folder import read_config

    found = []
    for name in components(folder):
        if not (folder / name / "config.json").is_file():
            continue  # a tokenizer, a scheduler
        config = read_config(folder / name)
        if is_component(config) and is_denoiser(network_class(folder / name / "config.json", config[CLASS])):
            found.append(name)
    return found


def requests_of(request: FolderRequest) -> dict[str, FolderRequest]:
    """Return a request of its own for each component that is quantized, by the name of its folder.

    Raises:
        ConfigError: There is no such component, it gets no scheme, or an option does not apply to a pipeline.
    """
    from quark.torch.model.folder_files import absent_components, components  # imports torch

    _refuse_of_one(request)
    there, asked = components(request.model), [item.partition("=") for item in request.component or ()]
    _check_names([name for name, _, _ in asked], request.model, there)
    whole = [name for name, equal, _ in asked if not equal] or denoisers(request.model)
    own = {name: scheme for name, equal, scheme in asked if equal}
    if not whole:
        raise ConfigError(
            f"{request.model} has no component that takes a timestep. Possible: --component, of "
            f"{', '.join(there) or 'which model_index.json names none'}."
        )
    _check_schemes(own, request.calib)
    _check_classes(request.model, {name: there[name] for name in (*whole, *own)})
    if absent := absent_components(request.model):  # a download that ended early, or a folder that was removed
        named = ", ".join(absent)
        logger.warning("%s names %s, and has no such folder: nor has the output.", request.model, named)
    part = replace(request, component=None, report=None, said=request.said - {"component", "report"})
    return {
        name: replace(
            _with_own_scheme(part, name, own[name])
            if name in own
            else replace(part, calib=data_of(request.calib, name)),
            model=request.model / name,
            output=str(Path(request.output) / name),
        )
        for name in dict.fromkeys((*whole, *own))
    }


def _with_own_scheme(part: FolderRequest, name: str, scheme: str) -> FolderRequest:
    """The request of a component with a scheme of its own, with its data where something reads them."""
    from quark.core.schemes import scheme_of

    data = _own_data(part.calib, name)
    if data is None or not (part.algorithm or scheme_of(scheme).needs_data):
        return replace(_without(part, _OF_DENOISERS), scheme=scheme)
    return replace(_without(part, _OF_DENOISERS - _OF_DATA), scheme=scheme, calib=data)


def _check_classes(folder: Path, classes: Mapping[str, tuple[str, str]]) -> None:
    """Raise FormatError where a pipeline loads a network by other code than that which it is quantized by."""
    from quark.torch.diffusion.component import CLASS, is_component
    from quark.torch.diffusion.network import import_diffusers
    from quark.torch.model.model_folder import read_config

    for name, (library, class_name) in classes.items():
        config = read_config(folder / name)
        if not is_component(config):
            continue
        if config[CLASS] != class_name:
            raise FormatError(
                f"{folder / name / 'config.json'} is that of a {config[CLASS]}, and {PIPELINE} names the class "
                f"{class_name!r}."
            )
        if library != "diffusers" and not hasattr(import_diffusers().pipelines, library):
            raise FormatError(
                f"{folder / PIPELINE} has {name} loaded from {library!r}, which is no part of diffusers; code of "
                "others is not run."
            )


def _refuse_of_one(request: FolderRequest) -> None:
    """Raise ConfigError for an option that is of one model."""
    for name in _OF_ONE:
        if name in request.said:
            raise ConfigError(
                f"--{name.replace('_', '-')} applies to a single model, and {request.model} is a pipeline. "
                "Possible: the folder of a component."
            )


def _check_schemes(own: dict[str, str], calib: Path | None) -> None:
    """Raise ConfigError for a scheme that there is not, or that needs data which the component does not have."""
    from quark.core.schemes import scheme_of

    check_words(own.values())
    for name, scheme in own.items():
        if scheme_of(scheme).needs_data and _own_data(calib, name) is None:
            raise ConfigError(
                f"--component {name}={scheme}: its static activation scales need data of {name}, and "
                f"{'no --calib is given' if calib is None else f'{calib} has no folder {name} of .npz files'}. "
                "Possible: --calib, a folder that quark.torch.record_steps wrote of a pipeline with its text encoders; "
                f"a scheme of weights alone or with dynamic activations, such as int8_wo; or `quark quantize` of the "
                f"folder {name}."
            )


def _without(request: FolderRequest, names: Collection[str]) -> FolderRequest:
    """A request without what is said of some fields, and without a scheme."""
    defaults = FolderRequest(model=request.model)
    return replace(request, said=request.said - {*names}, **{name: getattr(defaults, name) for name in names})


def data_of(steps: Path | None, name: str) -> Path | None:
    """The recorded steps of a component: those in the folder of its name, where the data have such folders."""
    inside = None if steps is None else steps / name
    return inside if inside is not None and inside.is_dir() else steps


def _own_data(steps: Path | None, name: str) -> Path | None:
    """The data of a component beside the denoisers, in the folder of its name; None where there are none.

    Of several denoisers, each with its folder, `record_steps` writes those of text encoders into each.
    """
    if steps is None or not steps.is_dir():
        return None
    places = [steps / name, *sorted(steps.glob(f"*/{name}"))]
    return next((place for place in places if next(place.glob("*.npz"), None) is not None), None)


def copy_rest(folder: Path, output: Path, names: Sequence[str]) -> None:
    """Copy what is not quantized: the other components, model_index.json, and small files beside it.

    Raises FormatError for a link that leads out of the folder, and OutputError where the disk is too small.
    """
    files = list(_rest(folder, names))
    check_disk(output, sum(file.stat().st_size for file in files))
    for file in files:
        target = output / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _rest(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    from quark.torch.model.folder_files import components, file_of, files_below

    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.stat().st_size <= BESIDE:
            yield file_of(folder, path.name)
    for name in components(folder):
        if name not in names:
            yield from (folder / file for file in files_below(folder, [name]))


def _check_names(names: Iterable[str], folder: Path, there: Iterable[str]) -> None:
    """Raise ConfigError for a component that there is not."""
    for name in names:
        if name not in there:
            raise ConfigError(f"--component {name}: {folder} has no such folder. {did_you_mean(name, there)}")
