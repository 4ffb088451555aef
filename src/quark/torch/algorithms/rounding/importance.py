"""Importance-weighted scales: the second moment of each input channel weighs the error of the weights that read it."""

from __future__ import annotations

from quark.core.checks import naming
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.input_group import InputGroup
from quark.torch.algorithms.rounding.fix_scales import chosen_layers, fix_scales


class ImportanceScale(Algorithm):
    """Scales under which sum_i E[x_i^2] (w_i - Q(w_i))^2 is least; see `core/solvers/importance.py`.

    A solver named after it (GPTQ) rounds on these scales.
    """

    solves_after_blocks = True

    def on_inputs(self, group: InputGroup, block: Block) -> None:
        layers = chosen_layers(group, block, self.config.inside_layer_modules)
        if layers:
            with naming(", ".join(layers)):
                fix_scales(layers, block, dict.fromkeys(layers, group.mean_square))
