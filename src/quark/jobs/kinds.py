"""The kinds of what is quantized as folders of models: a list, of which the first that takes a job does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quark.base.files import atomic_folder, check_apart, check_folder
from quark.base.log import logger, severity
from quark.errors import ConfigError
from quark.jobs.configure_folder import check_before_values, configure
from quark.jobs.denoisers import configure_denoiser, is_for_comfyui
from quark.jobs.folders.gguf_files import fill, opened_gguf
from quark.jobs.folders.job import FolderJob
from quark.jobs.folders.pipeline import copy_rest, requests_of
from quark.jobs.folders.sentence_encoders import around, is_sentence_encoder, model_of
from quark.jobs.processes import refuse_processes
from quark.jobs.recipes.recipe import Recipe
from quark.jobs.request import is_adapter, is_gguf, is_pipeline
from quark.jobs.run_folder import FolderResult, run_model
from quark.jobs.words import RECIPE

if TYPE_CHECKING:
    from quark.jobs.denoisers import DenoiserJob

    Parts = Mapping[str, FolderJob | DenoiserJob]
    """Component -> what is done for it, as it is configured; "" for what has no components."""


@dataclass(frozen=True)
class FolderKind:
    """A kind of what is quantized.

    Attributes:
        takes: Whether a job is of this kind.
        configured: Within: what is done to which models. Raises as `configure` does.
        run: Quantizes, and writes the result. Raises QuarkError as `configured` and the flow do.
        is_evaluated: Whether `quark evaluate` compares what is made with it.
    """

    takes: Callable[[FolderJob], bool]
    configured: Callable[[FolderJob], AbstractContextManager[Parts]]
    run: Callable[[FolderJob], FolderResult]
    is_evaluated: bool = True


def kind_of(job: FolderJob) -> FolderKind:
    """The kind of a job. Raises NotSupportedError for a file that is made of no such model."""
    return next(kind for kind in KINDS if kind.takes(job))


def _adapted(job: FolderJob) -> FolderJob:
    """Return the job for an adapter of PEFT, known from its base."""
    from quark.torch.flows.adapters import base_of

    base = base_of(job.request.model)
    return configure(replace(job.of(base.path), open=lambda: base))


def _run_adapter(job: FolderJob) -> FolderResult:
    """The base and the adapter become a folder first."""
    from quark.torch.flows.adapters import merged

    adapter = job.request.model
    if job.request.report is not None:
        raise ConfigError(
            f"--report compares folders, and {adapter} is an adapter, whose whole model is gone when it is quantized. "
            "Possible: no --report."
        )
    job.export.check_output(job.request.calib)
    with severity(3):  # what is asked for, before the work, which says the same
        _adapted(job)
    with merged(adapter, Path(job.request.output)) as folder:
        return _run_in_place(job.of(folder), adapter)


def _run_in_place(job: FolderJob, named: Path) -> FolderResult:
    """Quantize and write the model of a folder, which is removed afterwards."""
    try:
        return run_model(job, named)
    finally:
        job.folder.close()


@contextmanager
def _gguf_folder(job: FolderJob) -> Iterator[Parts]:
    """The folder that is made of a GGUF file; with values where a budget measures layers."""
    with opened_gguf(job.request.model, job.request.dtype) as made:
        job = job.of(made.path)
        if job.request.bits is not None or job.request.size is not None:
            check_before_values(job)
            fill(made)
            job = job.of(made.path)
        yield {"": configure(job)}
        job.folder.close()


def _run_gguf(job: FolderJob) -> FolderResult:
    """The folder gets its tensors when it is known that the job can be done."""
    named, output = job.request.model, Path(job.request.output)
    check_apart(output, named)
    with opened_gguf(named, job.request.dtype, output) as made:
        job = job.of(made.path)
        job.export.check_output(job.request.calib)
        check_before_values(job)
        fill(made)
        return _run_in_place(job.of(made.path), named)


def _run_encoder(job: FolderJob) -> FolderResult:
    """Quantize the model of a sentence encoder, and copy the files around it."""
    named, output = job.request.model, Path(job.request.output)
    with around(named, output, job.form, job.request.force) as (model, place):
        result = run_model(job.of(model, output=str(place)), named)
    return replace(result, path=output)


def _components(job: FolderJob) -> dict[str, FolderJob]:
    """Return the job of each component of a pipeline that is quantized, by its name."""
    return {
        name: configure(replace(job.of(part.model), request=part, choice=None if part.goal is None else job.choice))
        for name, part in requests_of(job.request).items()
    }


def _run_pipeline(job: FolderJob) -> FolderResult:
    """One component after another; the others are copied."""
    refuse_processes("A pipeline of several models")
    start, request, output = time.perf_counter(), job.request, Path(job.request.output)
    check_apart(output, request.model, whole=True)
    check_apart(output, request.calib)
    check_folder(output, request.force)
    parts = _components(job)
    for part in parts.values():  # all are refused before the first is made
        part.check_data()
        part.export.check(part.schemes, part.folder)
    recipe, results = Recipe.of(request), dict[str, FolderResult]()
    with atomic_folder(output, request.force) as folder:
        copy_rest(request.model, folder, [*parts])
        for name, part in parts.items():
            logger.info("Component %s:", name)
            inside = replace(part, request=replace(part.request, output=str(folder / name)))
            results[name] = run_model(inside, part.request.model)
        (folder / RECIPE).write_text(recipe.text(in_folder=True), encoding="utf-8")
    before, after = (sum(column) for column in zip(*((r.before, r.after) for r in results.values()), strict=True))
    first, choice = next(iter(results.values())).job, None if job.choice is None else job.choice.of_pipeline()
    seconds = time.perf_counter() - start
    return FolderResult(output, before, after, seconds, replace(first, choice=choice), None, [], recipe, results)


def _run_denoiser(job: FolderJob) -> FolderResult:
    """A denoiser becomes one file of ComfyUI."""
    start, made = time.perf_counter(), configure_denoiser(job)
    made.check_data()
    made.write(made.file, job.request.force)
    seconds, size, done = time.perf_counter() - start, made.file.stat().st_size, replace(job, scheme=made.scheme)
    return FolderResult(made.file, made.source.bytes, size, seconds, done, None, [], Recipe.of(job.request, {}))


KINDS = (
    FolderKind(is_for_comfyui, lambda job: nullcontext({"": configure_denoiser(job)}), _run_denoiser, False),
    FolderKind(lambda job: is_gguf(job.request.model), _gguf_folder, _run_gguf),
    FolderKind(lambda job: is_pipeline(job.request.model), lambda job: nullcontext(_components(job)), _run_pipeline),
    FolderKind(
        lambda job: is_sentence_encoder(job.request.model),
        lambda job: nullcontext({"": configure(job.of(model_of(job.request.model)))}),
        _run_encoder,
    ),
    FolderKind(
        lambda job: is_adapter(job.request.model), lambda job: nullcontext({"": _adapted(job)}), _run_adapter, False
    ),
    FolderKind(
        lambda job: True,  # a folder of transformers, or of a network of diffusers
        lambda job: nullcontext({"": configure(job)}),
        lambda job: run_model(job, job.request.model),
    ),
)
