"""Prepared: a float model after its passes, its calibration data, and what is learned of it on the way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from quark.onnx.calibration.byproducts import Byproducts
from quark.onnx.calibration.statistics import Statistics, fingerprint


@dataclass(frozen=True)
class Prepared:
    """A float model from which quantized ones are made: by any settings, as searches change settings only.

    Attributes:
        model: The float model, which `convert` changes; `copy` leaves it as it is.
        data: Calibration data: `Samples`, an object with `get_next()`, an iterable of samples, or None.
        identity: Fingerprint of the model: before its passes, for the statistics file; as it is, for statistics in
            memory; "" where it is not known.
        statistics: Statistics in memory by fingerprint, used and completed instead of a file; None for those of each
            pass.
        byproducts: Values that calibration gives in addition to ranges; nothing of a model that is simulated.
    """

    model: ir.Model
    data: Any = None
    identity: str = ""
    statistics: dict[str, Statistics] | None = None
    byproducts: Byproducts = field(default_factory=Byproducts)

    @property
    def own_statistics(self) -> Statistics | None:
        """The statistics in memory of this model; None where there is no memory for them."""
        return None if self.statistics is None else self.statistics.setdefault(self.identity, Statistics(self.identity))

    def in_memory(self) -> Prepared:
        """This model with statistics in memory."""
        return self if self.statistics is not None else replace(self, statistics={})

    def copy(self) -> Prepared:
        """A copy of the model with the same data and statistics, and byproducts of its own."""
        return replace(self, model=self.model.clone(), byproducts=Byproducts())

    def changed(self, places: int) -> Prepared:
        """This model after `places` of it were changed: statistics of simulated or rescaled layers are their own."""
        byproducts, identity = self.byproducts, self.identity
        if places and (byproducts.output_names or byproducts.all_outputs is not None):
            byproducts = Byproducts()
        if (places and identity) or (self.statistics is not None and not identity):
            identity = fingerprint(self.model)
        return replace(self, identity=identity, byproducts=byproducts)
