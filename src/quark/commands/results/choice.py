"""The table of what a bit budget chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from quark.base.command_line import new_table

if TYPE_CHECKING:
    from quark.torch.bit_budget.sensitivity import BudgetChoice, SensitivityTable


def choice_table(table: SensitivityTable, choice: BudgetChoice) -> Table:
    """What each group gets, and what one scheme for all would give."""
    shown = new_table("layers", "scheme", "MB", "loss", title="Choice")
    for group in table.groups:
        name = choice.schemes[group.layers[0]]
        leaves = [layer.rpartition(".")[2] for layer in group.layers]
        more = f" ... {leaves[-1]}" if len(leaves) > 1 else ""
        shown.add_row(f"{group.layers[0]}{more}", name, f"{group.sizes[name] / 1e6:.2f}", f"{group.losses[name]:.2e}")
    shown.add_section()
    for candidate in table.candidates:
        uniform = table.uniform(candidate)
        if uniform is not None:
            shown.add_row(
                "all", f"{candidate} ({uniform.bits:.3f} bits)", f"{uniform.size / 1e6:.2f}", f"{uniform.loss:.2e}"
            )
    shown.add_row("chosen", f"{choice.bits:.3f} bits", f"{choice.size / 1e6:.2f}", f"{choice.loss:.2e}")
    return shown
