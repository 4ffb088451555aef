"""Bias correction: the mean error that quantization gives each output channel, as far as it is certain.

    b_c += E[y_c] - E[y~_c]        y: output of the float layer, y~: of the quantized one     (the empirical form)

    m, s: mean and standard error of the difference over examples, each averaged over its positions
    correction = m * max(0, 1 - (2 s / m)^2)

A mean below two standard errors is noise, and gives nothing; a certain one is taken whole. Positions of one example
resemble each other, so that only examples count. Nagel et al. 2019 (arXiv:1906.04721), section 4.2; the shrinkage is
of the kind of James and Stein 1961.
"""

from __future__ import annotations

from quark.core.array import Array, namespace
from quark.errors import CalibrationError

_ERRORS = 2.0
"""Standard errors below which a mean is noise."""
LEAST, LEAST_OF_WEIGHTS = 8, 4
"""Fewer examples have errors of their own that others do not share: correcting those was measured to hurt. Of OCR
direction in XINT8, 4 examples lose 1.2 and 2.7 dB, 8 gain 2.7 and 5.0 and 12 gain 2.1 and 3.0; in five more models 8
examples gain 0.04 to 9 dB. What weights alone get wrong depends on the mean of their inputs only: four examples gain
5 to 11 dB of three OCR models.
"""


def require_examples(count: int, least: int = LEAST) -> None:
    """Raise CalibrationError for fewer examples than tell errors from noise."""
    if count < least:
        raise CalibrationError(
            f"Bias correction needs at least {least} examples to tell errors from noise, got {count}."
        )


def certain_mean(differences: Array, least: int = LEAST) -> Array:
    """The mean of each channel, less the more uncertain it is.

    Args:
        differences: Of each example the mean over its positions, shape (examples, channels).
        least: How many examples it takes; at least 2.

    Raises:
        CalibrationError: Fewer.
    """
    xp, count = namespace(differences), len(differences)
    require_examples(count, least)
    mean = differences.mean(0)
    variance = ((differences - mean) ** 2).sum(0) / (count - 1) / count
    power = mean**2
    return mean * xp.clip(1 - _ERRORS**2 * variance / xp.where(power > 0, power, 1.0), 0.0, None)
