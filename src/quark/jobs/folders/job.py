"""The job of a model folder: one object, from what its words say to what each of its layers gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.errors import CalibrationError
from quark.goals import GoalChoice
from quark.jobs.folders.bit_budget import Budget
from quark.jobs.folders.calibration import NO_DATA, Calibration
from quark.jobs.folders.export import Export
from quark.jobs.folders.schemes import in_file
from quark.jobs.request import FolderRequest

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable
    from quark.torch.checkpoint.opened import OpenedFolder
    from quark.torch.flows.predicted_size import FolderPlan


@dataclass(frozen=True)
class FolderJob:
    """A job for a model folder: the request, and all that is known before a weight is read.

    Attributes:
        request: What was asked for.
        choice: What its goal chose, and why; None without a goal.
        form: How it is written: a value of --export-format.
        open: Gives the folder, which is opened once.
        show: Is told what a budget chose, before anything is quantized by it.
        scheme: Of all layers; None with a budget. This and what follows is of `configure`.
        budget: In place of a scheme.
        algorithms: Names, and configs of those with parameters.
        config: A `quark.torch.QConfig`; with a budget the one that its choice completes.
        calibration: The data, or the text of the package where something needs them.
        why: What needs calibration data; None: nothing does.
        plan: What each layer gets; None of a budget that has not chosen, and of a folder that is not read as float.
    """

    request: FolderRequest
    choice: GoalChoice | None
    form: str
    open: Callable[[], OpenedFolder]
    show: Callable[[SensitivityTable, BudgetChoice], None] | None = None
    scheme: str | None = None
    budget: Budget | None = None
    algorithms: Sequence[Any] = ()
    config: Any = None
    calibration: Calibration = NO_DATA
    why: str | None = None
    plan: FolderPlan | None = None

    @property
    def folder(self) -> OpenedFolder:
        """The folder of the model."""
        return self.open()

    @property
    def reader(self) -> str:
        """The program that the folder is written for; see `export_safetensors`."""
        return "transformers" if self.choice is None else self.choice.goal.reader

    @property
    def export(self) -> Export:
        """Where and how the result is written."""
        request = self.request
        return Export(
            request.model, Path(request.output), self.form, request.weight_format, request.pack_method,
            request.max_shard_size, request.force, reader=self.reader, goal=request.goal,
        )  # fmt: skip

    @property
    def lacks(self) -> str | None:
        """The part of the job that needs data where there are none that the model takes; None where nothing does."""
        return self.why if self.calibration.path is None else None

    @property
    def title(self) -> str:
        """The scheme or the budget of the layers, in a word."""
        return self.budget.named() if self.budget is not None else self.scheme or ""

    @property
    def schemes(self) -> list[str]:
        """The names of schemes that are asked for; block types of GGUF files are none."""
        named = self.budget.candidates if self.budget is not None else (self.scheme or "",)
        layers = [item.rpartition("=")[2] for item in self.request.layer or ()]
        return [*([] if in_file(self.scheme, self.budget, self.form) else named), *layers]

    def check_data(self) -> None:
        """Raise CalibrationError where the job needs data that are not given. A plan needs none."""
        if self.lacks is not None:
            why = f"{self.lacks[0].upper()}{self.lacks[1:]}"
            raise CalibrationError(f"{why} needs calibration data: pass --calib, {RECORDED}.")

    def of(self, model: Path, **said: Any) -> FolderJob:
        """The job for another folder, which is not opened yet, and other words of the request."""
        request = replace(self.request, model=model, **said)
        return replace(self, request=request, open=opener(request))


RECORDED = "calls of the network that quark.torch.record_steps recorded, or arrays by name (.npz)"
"""The data that a network of diffusers is calibrated with."""


def opener(request: FolderRequest) -> Callable[[], OpenedFolder]:
    """The function that opens the folder of a request when it is first called."""

    @cache
    def opened() -> OpenedFolder:
        from quark.jobs.folders.models import open_folder  # imports torch: after what the words alone say

        return open_folder(request.model, request.trust_remote_code)

    return opened
