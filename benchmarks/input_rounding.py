"""`python -m benchmarks.input_rounding`: what rounding weights, and inputs, loses by itself, on the example model.

Rows are schemes whose inputs are rounded in each forward. All is rounded to nearest; where weights are left out, they
are float, and where inputs are. `removable` is the share of the loss that is gone where the weights lose nothing, 1 -
inputs / both. The other columns are the loss of the inputs of one kind of layer, where all else is float: layers that
read one tensor are one kind. KL divergence in millinats, on 24 windows of 256 held-out tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from benchmarks.choices import CALIBRATION, FOLDER, HELD_OUT, TEXT, WINDOW, Measure, load
from benchmarks.tables import console

SCHEMES = ("nvfp4", "mxfp4", "int4_wa_64")
KINDS = {
    "queries, keys, values": ("q_proj", "k_proj", "v_proj"),
    "attention output": ("o_proj",),
    "gate and up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Kind of input -> the layers that read it."""


def main() -> None:
    logging.disable(logging.WARNING)
    disable_progress_bar()
    measure = Measure(FOLDER, WINDOW, TEXT / "calibration.txt", CALIBRATION, TEXT / "heldout.txt", HELD_OUT)
    table = Table("scheme", "both", "weights", "inputs", "removable", *KINDS, title=measure.float_row())
    for scheme in SCHEMES:
        both, weights, inputs = (loss(measure, scheme, *what) for what in ((True, True), (True, False), (False, True)))
        kinds = [loss(measure, scheme, False, True, kind) for kind in KINDS]
        figures = [f"{value:.3g}" for value in (both, weights, inputs)]
        table.add_row(scheme, *figures, f"{1 - inputs / both:.0%}", *(f"{value:.3g}" for value in kinds))
    console().print(table)


def loss(measure: Measure, scheme: str, weights: bool, inputs: bool, kind: str = "") -> float:
    """Millinats of a part of a scheme, to nearest; of one kind of layers alone, where it is named."""
    from quark.torch import LLMTemplate, ModelQuantizer

    config = LLMTemplate.get("llama").get_config(scheme)
    parts: dict[str, Any] = {} if weights else {"weight": None}
    parts |= {} if inputs else {"input_tensors": None}
    others = [f"*{layer}" for name, layers in KINDS.items() if kind not in ("", name) for layer in layers]
    settings = replace(
        config,
        global_quant_config=replace(config.global_quant_config, **parts),
        exclude=[*config.exclude, *others],
        shared_scale_groups=config.shared_scale_groups if weights else [],
    )
    return measure.loss(ModelQuantizer(settings).quantize_model(load(), measure.data))[0]


if __name__ == "__main__":
    main()
