"""The pictures that a pipeline of diffusers makes with a float and a quantized denoiser, from equal noise."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.libraries.loading import as_format_error
from quark.base.log import logger
from quark.errors import ConfigError, QuarkError, one_line
from quark.jobs.folders.compared.measure import MeasuredFolders

if TYPE_CHECKING:
    from quark.torch.flows.compared.denoiser_costs import DenoiserCosts

PROMPTS = ("a photograph of a red fox in the snow", "a watercolor of a harbour at dawn")
"""Where no others are asked for."""
PROMPT, STEPS = "prompt", "num_inference_steps"
"""Arguments of a pipeline."""


def pictures_of(
    pipeline: Path, measured: Mapping[str, MeasuredFolders], prompts: Sequence[str] | None, steps: int | None
) -> dict[str, DenoiserCosts]:
    """The pictures of each denoiser; a pipeline that cannot make them is said in the log, and gives none.

    Args:
        pipeline: Folder of the float one.
        measured: Component -> both networks.
        prompts: A picture each; None: `PROMPTS`, or one picture of a pipeline that takes none.
        steps: Of a run; None: what the pipeline takes by itself.

    Raises:
        ConfigError: What is asked for is no argument of the pipeline.
    """
    import diffusers

    from quark.torch.flows.compared.denoiser_costs import compare_denoisers

    given = {name: found.before for name, found in measured.items()}
    dtype = next(iter(next(iter(given.values())).parameters())).dtype
    try:
        with _without_bar(diffusers.utils.logging), as_format_error(pipeline):
            loaded = diffusers.DiffusionPipeline.from_pretrained(pipeline, dtype=dtype, local_files_only=True, **given)
        loaded.set_progress_bar_config(disable=True)
    except (QuarkError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        return _none(pipeline, error)
    taken = inspect.signature(loaded.__call__).parameters
    for name, value in {PROMPT: prompts, STEPS: steps}.items():
        if value and name not in taken:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {type(loaded).__name__} has no such argument. Possible: leave it out."
            )
    asked: list[Any] = list(prompts or PROMPTS) if PROMPT in taken else [{}]
    more: dict[str, Any] = {} if steps is None else {STEPS: steps}
    try:
        return {
            name: compare_denoisers(loaded, found.after, prompts=asked, denoiser=found.before, **more)
            for name, found in measured.items()
        }
    except (QuarkError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
        return _none(pipeline, error)


def _none(pipeline: Path, error: Exception) -> dict[str, DenoiserCosts]:
    logger.warning("No pictures: %s does not run on prompts alone (%s).", pipeline, one_line(error))
    return {}


@contextmanager
def _without_bar(logging: Any) -> Iterator[None]:
    """Within: diffusers shows no bar while it loads."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
