"""Tasks of the evaluation harness (lm-eval): both models answer them, and nothing is downloaded.

A task is known by its name, with data that lie in the cache of datasets, or is a file of YAML, which says where its
data are and may name functions of files beside it, which run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.base.libraries.huggingface_hub import offline
from quark.base.log import logger
from quark.errors import ConfigError, one_line
from quark.jobs.folders.compared.task_scores import Pair, TaskScores
from quark.jobs.folders.model_inputs import ModelInputs, StepInputs
from quark.torch.llm.other_packages import other_package


class Harness:
    """Tasks that both models answer.

    Args:
        tasks: Names of tasks, or files of YAML; several may stand in one text, with commas between them.
        inputs: What the models take.
        streamed: Whether they are read block by block.
        limit: Most questions of each task; None: all.

    Raises:
        ConfigError: The models are no causal language models, or are not in memory, or there is no such file.
        MissingDependencyError: The package lm-eval is not installed.
    """

    def __init__(
        self, tasks: Sequence[str], inputs: ModelInputs | StepInputs, streamed: bool, limit: int | None
    ) -> None:
        self.names = [name.strip() for each in tasks for name in each.split(",") if name.strip()]
        if not isinstance(inputs, ModelInputs) or not inputs.continues_text:
            raise ConfigError(f"--tasks are for causal language models, and {inputs.model_class.__name__} is none.")
        if streamed:
            raise ConfigError("--tasks need both models in memory. Possible: --no-stream.")
        if not self.names:
            raise ConfigError(
                "--tasks names none. Possible: the names of lm-eval, as in arc_easy,piqa, or a .yaml file."
            )
        for index, name in enumerate(self.names):
            if name.endswith((".yaml", ".yml")):
                if not Path(name).is_file():
                    raise ConfigError(f"--tasks {name}: there is no such file.")
                self.names[index] = str(Path(name).absolute())
                logger.info("--tasks %s: functions of files beside it run, where it names some.", name)
        self.inputs, self.limit = inputs, limit
        with offline():
            self._lm_eval = other_package("lm_eval", "--tasks", "--data with choices or answers needs no package.")
            self._models = other_package("lm_eval.models.huggingface", "--tasks")

    def scores(self, models: Pair) -> TaskScores:
        """The scores of both models. Raises ConfigError for a task that there is not, or whose data are not there."""
        found = [self._figures(each.model) for each in models]
        return TaskScores(f"{', '.join(found[0][1])} by lm-eval", {
            name: (value, found[1][0][name]) for name, value in found[0][0].items() if name in found[1][0]
        })  # fmt: skip

    def _figures(self, model: Any) -> tuple[dict[str, float], list[str]]:
        """Task and name of a figure -> its value; and the tasks."""
        tokenizer = self.inputs.tokenizer
        try:
            with offline():
                wrapped = self._models.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
                results = self._lm_eval.simple_evaluate(
                    model=wrapped, tasks=self.names, limit=self.limit, bootstrap_iters=0, log_samples=False
                )["results"]
        except Exception as error:
            raise ConfigError(
                f"--tasks {','.join(self.names)}: lm-eval raises {type(error).__name__}: {one_line(error)[:300]} "
                "Nothing is downloaded: data have to lie in the cache of datasets, or where a .yaml file says."
            ) from error
        return _named(results), list(results)


def _named(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The figures of tasks; those of the filter "none" without its name, and no standard errors."""
    found = {}
    for task, figures in results.items():
        for key, value in figures.items():
            name, _, of = key.partition(",")
            if of and not name.endswith("_stderr") and isinstance(value, (int, float)):
                found[f"{task} {name}" + ("" if of == "none" else f" ({of})")] = float(value)
    return found
