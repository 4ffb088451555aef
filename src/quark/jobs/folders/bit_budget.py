"""`--bits` and `--size`: a budget in place of a scheme, and the table of sensitivities that it chooses from."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.base.files import check_file
from quark.errors import CalibrationError, UsageError
from quark.goals.choice import GoalChoice, fusing_programs
from quark.jobs.folders.calibration import Calibration
from quark.jobs.request import FolderRequest

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable
    from quark.torch.checkpoint.opened import OpenedFolder

SIZES = "Possible: 2.1GB, 800MB, 2GiB, 30%."
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """The options of a budget.

    Attributes:
        bits: For each weight of the layers that are chosen for; None: size.
        size: Bytes of the whole model; None: bits.
        candidates: Names of schemes; empty: the default.
        sensitivity: File of the table.
        export_format: Whose bytes are counted.
        fused_by: The programs that make one layer of several, which then get one scheme.
    """

    bits: float | None
    size: int | None
    candidates: tuple[str, ...]
    sensitivity: Path | None
    export_format: str
    fused_by: tuple[str, ...]

    @property
    def is_measured(self) -> bool:
        """True where there is no table yet, so that one is made of calibration data."""
        return self.sensitivity is None or not self.sensitivity.exists()

    def named(self) -> str:
        """The budget as an option, for what is printed."""
        return f"--bits {self.bits:g}" if self.bits is not None else f"--size {(self.size or 0) / 1e6:.2f}MB"


def asked_budget(request: FolderRequest, form: str, choice: GoalChoice | None) -> Budget | None:
    """The budget that a request asks for, or None where a scheme says all.

    Layers of which a goal makes one get one scheme; without a goal, those of which any program makes one that may load
    the mix.

    Args:
        request: What was asked for.
        form: How the result is written.
        choice: The mix that its goal chose; None without a goal.

    Raises:
        UsageError: None or several of --scheme, --bits and --size; an option that belongs to a budget without one; a
            size that is no size, or as large as the model.
        NotSupportedError: A format that holds one scheme only.
    """
    if choice is None:
        _check_words(request)
        if request.bits is None and request.size is None:
            return None
    # The flow imports torch: when it runs, so that --help is instant.
    from quark.torch.bit_budget.measure import mixed_format

    rules = mixed_format(form)
    named = named_candidates(request.candidates if choice is None else choice.mixed)
    if choice is None:
        fused_by = fusing_programs(form, named or rules.candidates)
    else:
        fused_by = (choice.goal.program,) if choice.goal.fuses else ()
    limit = None if request.size is None else size_within(request.size, request.model)
    return Budget(request.bits, limit, named, request.sensitivity, form, fused_by)


def _check_words(request: FolderRequest) -> None:
    """Raise UsageError for words of a budget that do not go together; with a goal, its choice has looked at them."""
    given = {"--scheme": request.scheme, "--bits": request.bits, "--size": request.size}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} exclude each other. Possible: one of --scheme, --bits and --size.")
    if request.bits is None and request.size is None:
        for name, value in (("--candidates", request.candidates), ("--sensitivity", request.sensitivity)):
            if value:
                raise UsageError(f"{name} belongs to --bits or --size, which are not given.")
    elif request.bits is not None and not 0 < request.bits < math.inf:
        raise UsageError(f"--bits {request.bits:g} is no number of bits for a weight. Possible: 4.25, 3.5.")


def named_candidates(words: Sequence[str] | None) -> tuple[str, ...]:
    """The names in --candidates."""
    return tuple(name.strip() for item in words or [] for name in item.split(",") if name.strip())


def size_within(text: str, model: Path) -> int:
    """The bytes of a size, or of a share such as 30% of the weight files of a folder. Raises UsageError."""
    from quark.jobs.folders.models import folder_bytes

    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if not share:
        return bytes_of(text)
    whole = folder_bytes(model)
    if not whole:
        raise UsageError(f"--size {text.strip():.40}: {model} holds no safetensors files to be a share of. {SIZES}")
    size = int(Decimal(share[1]) * whole / 100)
    if not 0 < size < whole:
        raise UsageError(f"--size {text.strip():.40} is no part of {model} ({whole / 1e6:.2f} MB). Possible: 25%, 50%.")
    return size


def bytes_of(text: str) -> int:
    """The bytes of a size such as 2.1GB (10^9) or 2GiB (2^30). Raises UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    if not found:
        raise UsageError(f"--size {text!r} is no size. {SIZES}")
    size = int(Decimal(found[1]) * UNITS[found[2] or ""])
    if not 0 < size < 1 << 63:
        raise UsageError(f"--size {text.strip():.40} is no size that a file can have. {SIZES}")
    return size


def choose_for_budget(
    request: FolderRequest, folder: OpenedFolder, budget: Budget, base: Any, calibration: Calibration
) -> tuple[SensitivityTable, BudgetChoice]:
    """The table of a model, read from its file or measured, and the choice within the budget.

    Args:
        request: Says where blocks run.
        folder: Of the model.
        budget: What is asked for.
        base: Config of what is excluded, and of layers with a scheme of their own.
        calibration: Calibration data, needed where there is no table yet.

    Raises:
        CalibrationError: Neither a table nor data.
        ConfigError: The table is of another model or other data, has other candidates, or the budget cannot be met.
    """
    from quark.jobs.folders.models import inputs_of, skeleton_of
    from quark.torch.bit_budget.measure import measure_sensitivity, mixed_format, settings_of_folder
    from quark.torch.bit_budget.sensitivity import AskedBudget, SensitivityTable

    data = calibration.read(inputs_of(folder.path, skeleton_of(folder)))
    if budget.sensitivity is not None and not budget.is_measured:
        table = SensitivityTable.load(budget.sensitivity)
        rules = mixed_format(budget.export_format, budget.fused_by)
        table.check(settings_of_folder(request.model, base, rules), data)
    elif data is None:
        raise CalibrationError(f"{budget.named()} needs calibration data: pass --calib FILE.")
    else:
        file, work = budget.sensitivity, None
        if file is not None:
            check_file(file, overwrite=False)
            work = file.with_name(f"{file.name}.partial")
        table = measure_sensitivity(
            request.model, data, budget.candidates or None, base, export_format=budget.export_format,
            alike=budget.fused_by, device=request.device, work=work, budget=AskedBudget(budget.bits, budget.size),
        )  # fmt: skip
        if file is not None:
            table.save(file)
    return table, table.choose(bits=budget.bits, size=budget.size, candidates=budget.candidates or None)
