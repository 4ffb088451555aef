"""The observers by name. A new one is a file here and a line below."""

from __future__ import annotations

from quark.core.names.registry import Registry
from quark.core.observers.base import Observer
from quark.core.observers.block import BlockObserver, MXDiffsObserver
from quark.core.observers.distribution import DistributionObserver
from quark.core.observers.entropy import EntropyObserver
from quark.core.observers.histogram import HistogramObserver
from quark.core.observers.kl_j import JeffreysObserver
from quark.core.observers.layerwise_percentile import LayerwisePercentileObserver
from quark.core.observers.mean_magnitude import MeanMagnitudeObserver
from quark.core.observers.min_max import MinMaxObserver
from quark.core.observers.moving_average import MovingAverageObserver
from quark.core.observers.mse import CentersMSEObserver, MSEObserver, PercentileMSEObserver
from quark.core.observers.percentile import PercentileObserver
from quark.core.observers.placeholder import PlaceholderObserver
from quark.core.observers.power_of_two import (
    PowerOfTwoMinMaxObserver,
    PowerOfTwoMinMSEObserver,
    PowerOfTwoMostCommonObserver,
    PowerOfTwoMSEPercentileObserver,
    PowerOfTwoNonOverflowObserver,
)
from quark.core.observers.quantile_search import QuantileSearchObserver
from quark.core.observers.three_sigma import ThreeSigmaObserver

OBSERVERS: Registry[type[Observer]] = Registry("observer")
OBSERVERS.register("min_max", MinMaxObserver)
OBSERVERS.register("moving_average", MovingAverageObserver)
OBSERVERS.register("percentile", PercentileObserver)
OBSERVERS.register("layerwise_percentile", LayerwisePercentileObserver)
OBSERVERS.register("distribution", DistributionObserver)
OBSERVERS.register("mse", MSEObserver)
OBSERVERS.register("mse_percentile", PercentileMSEObserver)
OBSERVERS.register("mse_centers", CentersMSEObserver)
OBSERVERS.register("histogram", HistogramObserver)
OBSERVERS.register("quantile_search", QuantileSearchObserver)
OBSERVERS.register("entropy", EntropyObserver)
OBSERVERS.register("pof2_min_max", PowerOfTwoMinMaxObserver)
OBSERVERS.register("pof2_min_mse", PowerOfTwoMinMSEObserver)
OBSERVERS.register("pof2_mse_percentile", PowerOfTwoMSEPercentileObserver)
OBSERVERS.register("pof2_most_common", PowerOfTwoMostCommonObserver)
OBSERVERS.register("pof2_non_overflow", PowerOfTwoNonOverflowObserver)
OBSERVERS.register("block", BlockObserver)
OBSERVERS.register("mx_diffs", MXDiffsObserver)
OBSERVERS.register("mean_magnitude", MeanMagnitudeObserver)
OBSERVERS.register("three_sigma", ThreeSigmaObserver)
OBSERVERS.register("kl_j", JeffreysObserver)
OBSERVERS.register("placeholder", PlaceholderObserver)

__all__ = ["OBSERVERS", "Observer"]
