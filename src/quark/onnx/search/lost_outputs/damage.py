"""The damage of a quantization to the outputs of a model, on as many of its calibration samples as it takes.

    sqnr = 10 log10( sum(x^2) / sum((x - y)^2) )      x: an output of the float model, y: the same of the quantized one

over samples and finite x, of each part that a Concat joins for itself (`graph/output_parts.py`), beside the share of
the decisions that are kept (`verdict.py`); the worst part counts. A few samples spread over all are run, more where the
model is small, LOOKED where others may show another value, twice as many where these differ much, and up to all that
were kept while these hold no event, or tell that the outputs are lost. What the float model gives for them is known
where calibration ran it: it need not run again, but for one sample where passes have changed it since it was loaded,
which tells whether it still gives the same.

A trial of another quantization ends after two samples where nothing is left, and takes more than the first few only
where it is near the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.base.log import logger
from quark.core.array import NumpyArray
from quark.errors import FormatError, QuarkError
from quark.onnx.calibration.byproducts import SampleOutputs
from quark.onnx.calibration.calibrate import model_session
from quark.onnx.calibration.data.inputs import Feed, model_inputs
from quark.onnx.calibration.data.padding import Padding, without_padding
from quark.onnx.calibration.data.readers import as_reader
from quark.onnx.calibration.data.samples import Store
from quark.onnx.config.settings import Settings
from quark.onnx.graph.edit import is_op
from quark.onnx.graph.output_parts import OutputPart, compared_parts
from quark.onnx.graph.proto_file import read_ends
from quark.onnx.graph.sessions import integer_kernels_are_exact, open_session, run_sample
from quark.onnx.search.lost_outputs.verdict import LEAST, Damage, Pair, Verdict, verdict_of
from quark.onnx_ops.saving import PROTOBUF_LIMIT, weight_bytes

Model = onnx.ModelProto | Path
"""A model in memory, weights inside, or its file."""

SAMPLES = 4
"""Samples of a large model that tell a good trial from a bad one, where they are clear."""
LOOKED = 16
"""Samples that the figure of a file comes from, where there are as many, and fewer do not tell it."""
CLEAR = 1.0
"""dB by which other samples may show less than few do, and these are enough. Where the noise is that of a few samples
(models of speech that were not calibrated), four show up to 8 dB more than 64 new ones, and 16 at most 4 dB more: of 18
files of nine models the margin of four was 1.3 dB or more in 16, and .8 in two, which were right to 1.4 dB."""
SHARE = 8
"""One sample in this many that calibration ran is looked at, if that is more: what it takes is a small part of it."""
PRODUCTS = 1_000_000_000
"""Products, of each weight with each input value, that are looked at in any case: under a second."""
_OUTLYING = 1000.0
"""Times the median of the largest inputs, from which on a sample is compared by itself: else no other one counts."""
MADE = "What was quantized"
"""The name of the file in errors: its own is for the moment only."""
MOST, MOST_BYTES = 512, 1 << 26
"""Samples that are kept, and their bytes."""


HOPELESS = 0.0
"""dB on the first samples, below which a trial needs no others: the noise is larger than the output."""
_FIRST = 2
"""Samples that tell that."""
_NEAR = 5.0
"""dB from the bound, within which a trial is compared on more samples."""
ROUNDING = 1e-8
"""Share of the power by which float outputs may differ and still be those of one model: what is lost shows above it."""


class SpreadSamples:
    """A reader that keeps some of the samples that are read through it, spread over all: the first may be silence.

    Every sample is kept until there are too many, then every other one, and so on; so memory holds a few at any time.

    Args:
        data: A reader, or an iterable of samples.
        model: The model that they are for.

    Attributes:
        outputs: Takes those of the float model, where it runs over what is read here.
        confirmed: Whether a run of the model has shown that they are those of the model as it was loaded.
    """

    def __init__(self, data: Any, model: ir.Model) -> None:
        self._data, self._inputs, self._feeds = without_padding(data, model), model_inputs(model), list[Feed]()
        self._count, self._stride, self._bytes = 0, 1, 0
        self.outputs = SampleOutputs([value.name or "" for value in model.graph.outputs], MOST_BYTES)
        self.confirmed = False

    @cached_property
    def _reader(self) -> Any:
        # Made when it is read: what is given with a dynamic quantization may be no data.
        return as_reader(self._data, self._inputs)

    def get_next(self) -> Any:
        """The next sample."""
        feed = self._reader.get_next()
        if isinstance(feed, dict):
            if self._count % self._stride == 0:
                self._feeds.append({name: np.asarray(value).copy() for name, value in feed.items()})
                self._bytes += _bytes_of(self._feeds[-1])
            while len(self._feeds) > (SAMPLES if self._bytes > MOST_BYTES else MOST):
                self._feeds, self._stride = self._feeds[::2], 2 * self._stride
                self._bytes = sum(map(_bytes_of, self._feeds))
            self._count += 1
        return feed

    def outputs_of(self, feed: Feed) -> dict[str, NumpyArray] | None:
        """Return the outputs of the float model for a sample that was kept, if they are known."""
        position = next((index for index, each in enumerate(self._feeds) if each is feed), None)
        arrays = None if position is None else self.outputs.of(position * self._stride)
        return None if arrays is None else dict(zip(self.outputs.names, arrays, strict=True))

    def feeds(self, least: int = LOOKED) -> list[Feed]:
        """Return the samples that were kept: a few that are spread over all, then LOOKED that are, then the others.

        Args:
            least: As many are read now, where calibration needed none (ranges from a file, weights only).
        """
        with suppress(QuarkError):
            while self._count < least and self.get_next() is not None:
                pass
        count = len(self._feeds)
        order = (
            index for few in (SAMPLES, LOOKED, max(1, count)) for index in range(0, count, max(1, -(-count // few)))
        )
        return [self._feeds[index] for index in dict.fromkeys(order)]


def _bytes_of(feed: Feed) -> int:
    return sum(array.nbytes for array in feed.values())


def damage(
    model: ir.Model,
    quantized: Model,
    feeds: Sequence[Feed],
    settings: Settings,
    more: SpreadSamples | None = None,
    trial: bool = False,
) -> Damage | None:
    """Compare the outputs of two models.

    Args:
        model: The float model as it was loaded: the runtime dies of some files that `load` mends.
        quantized: What was made of it.
        feeds: Samples, of which the first ones are spread over all.
        settings: The execution providers.
        more: What gives other samples, where those are too few.
        trial: Whether it is enough to tell a good quantization from a bad one.

    Returns:
        None where nothing can be compared: no samples, no float output with values, outputs whose shape follows from
        values, models of other inputs or outputs, or with operators that ONNX Runtime lacks.

    Raises:
        FormatError: ONNX Runtime does not load the quantized model.
    """
    if not feeds or not _have_same_outputs(model, quantized):
        return None
    least = LEAST if settings.least_sqnr is None else settings.least_sqnr
    looked = _Looked(compared_parts(model), Padding.of(model), least if trial else None)
    if not looked.parts:
        return None
    try:
        looked.run(model, quantized, feeds, settings, more)
    except FormatError:
        raise
    except QuarkError as error:
        logger.debug(f"The outputs cannot be compared: {error}")
        return None
    found = looked.found
    if not found:
        return None
    worst = min(found, key=lambda each: each.rank_at(least))
    sqnr = math.nan if worst.sqnr is None else worst.sqnr
    silent = all(each.silent for each in found)
    margin = worst.margin if worst.margin > CLEAR else 0.0
    return Damage(sqnr, str(worst.part), looked.count, worst.decisions, worst.lost(least), silent, margin)


def _have_same_outputs(model: ir.Model, quantized: Model) -> bool:
    """Return True where a session takes the quantized model, and both have the same inputs and outputs."""
    if isinstance(quantized, onnx.ModelProto) and quantized.ByteSize() > PROTOBUF_LIMIT:
        return False  # no session takes it from memory
    after = read_ends(quantized) if isinstance(quantized, Path) else quantized
    inputs = [list(map(str, model_inputs(each).values())) for each in (model, after)]
    names = [value.name or "" for value in model.graph.outputs]
    return inputs[0] == inputs[1] and names == [value.name for value in after.graph.output]


def _enough(model: ir.Model, feeds: Sequence[Feed]) -> int:
    """How many samples are looked at where these are clear."""
    values = sum(array.size for array in feeds[0].values())
    # How many there are: as initializers, and as the nodes that Paddle writes.
    tensors = [value.const_value for value in model.graph.initializers.values()]
    nodes = [node for node in model.graph if is_op(node, "Constant") and "value" in node.attributes]
    weights = sum(
        x.size for x in (*tensors, *(node.attributes["value"].as_tensor() for node in nodes)) if x is not None
    )
    return max(SAMPLES, len(feeds) // SHARE, PRODUCTS // max(1, weights * values))


class _FloatModel:
    """Gives the outputs of the float model for a sample: those that calibration saw, or else those of a session.

    Args:
        model: The float model as it was loaded.
        names: The outputs.
        settings: The execution providers.
        more: What may know outputs.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], settings: Settings, more: SpreadSamples | None) -> None:
        self._model, self._names, self._settings, self._more = model, names, settings, more
        if more is not None and not more.confirmed:
            more.confirmed = more.outputs.are_of(model)
        self._stack = ExitStack()
        self._session: Any = None

    def __enter__(self) -> _FloatModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what a session takes; another is opened when it is needed."""
        self._stack.close()
        self._session = None

    def __call__(self, feed: Feed) -> list[Any]:
        """The outputs for a sample."""
        more, seen = self._more, None if self._more is None else self._more.outputs_of(feed)
        if more is None or seen is None or any(name not in seen for name in self._names):
            if self._session is None:
                self._session = self._stack.enter_context(model_session(self._model, [], self._settings))
            return run_sample(self._session, self._names, feed)
        known = [seen[name] for name in self._names]
        if more.confirmed:
            return known
        with model_session(self._model, [], self._settings, once=True) as session:
            arrays = run_sample(session, self._names, feed)
        more.confirmed = all(map(_same, arrays, known))
        if not more.confirmed:
            self._more = None
        return arrays


def _same(x: Any, y: Any) -> bool:
    """Return True where two outputs differ by no more than sums in another order do."""
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)) or (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if x.dtype.kind != "f":
        return bool(np.array_equal(x, y))
    finite = np.isfinite(x)
    if not np.array_equal(finite, np.isfinite(y)):
        return False
    x, y = (np.where(finite, each, 0).astype(np.float64) for each in (x, y))
    return float(((x - y) ** 2).sum()) <= ROUNDING * float((x**2).sum())


class _Looked:
    """The parts of outputs for the samples that were run.

    Args:
        parts: Of the outputs that are compared.
        padding: Of the model: masked positions are not compared.
        trial: The bound in dB of which it is enough to tell which side a trial is on; None of what is no trial.
    """

    def __init__(self, parts: Sequence[OutputPart], padding: Padding, trial: float | None = None) -> None:
        self.parts, self.count, self._padding, self._trial = parts, 0, padding, trial
        self._names = list(dict.fromkeys(part.tensor for part in parts))
        self._store, self._peaks, self.found = Store(MOST_BYTES), list[float](), list[Verdict]()

    def run(
        self, model: ir.Model, quantized: Model, feeds: Sequence[Feed], settings: Settings, more: SpreadSamples | None
    ) -> None:
        """Run both models on as many samples as it takes; the arguments are those of `damage`."""
        few, ran = _enough(model, feeds), dict[int, Feed]()
        enough = max(few, LOOKED) if self._trial is None else few
        chosen = list(feeds[: few if self._trial is None else _FIRST])
        with _FloatModel(model, self._names, settings, more) as before:
            self._take(0, before, chosen)
            if weight_bytes(model) > MOST_BYTES:  # two models in memory are one too many
                before.close()
            after = open_session(quantized, in_float=not integer_kernels_are_exact(), name=MADE)
            self._take(1, partial(run_sample, after, self._names), chosen)
            while self._looked_at(chosen, enough):
                others = feeds if more is None else more.feeds(MOST)
                ran |= {id(feed): feed for feed in chosen}  # the order changes when more are read
                wanted = max(self.count, enough - self.count)
                chosen = [feed for feed in others if id(feed) not in ran][:wanted]
                if not chosen:
                    break
                self._take(0, before, chosen)
                self._take(1, partial(run_sample, after, self._names), chosen)

    def _take(self, which: int, outputs: Callable[[Feed], list[Any]], feeds: Sequence[Feed]) -> None:
        for index, feed in enumerate(feeds, self.count):
            arrays = self._padding.at_real(feed, outputs(feed))
            for name, array in zip(self._names, arrays, strict=True):
                if isinstance(array, np.ndarray):
                    self._store[which, index, name] = array

    def _looked_at(self, feeds: Sequence[Feed], enough: int) -> bool:
        """Compare with these samples, which both models have run, too; return True where more may tell more."""
        for feed in feeds:
            # Integers name things, and values that are not finite are none.
            floats = [array[np.isfinite(array)] for array in feed.values() if array.dtype.kind == "f"]
            self._peaks.append(max((float(np.abs(array).max(initial=0)) for array in floats), default=0.0))
        self.count += len(feeds)
        self.found = self.verdicts()
        if self._trial is not None and not self._may_turn(self._trial, self.count < enough):
            return False
        if self.count < enough and (self._trial is not None or any(each.margin > CLEAR for each in self.found)):
            return True
        # Whether more samples are worth their time: twice as many where some differ, all where something seems lost.
        return any(each.unclear and (self.count <= enough or each.silent or each.lost()) for each in self.found)

    def _may_turn(self, least: float, first: bool) -> bool:
        """Return True where more samples may show a trial on the other side of a bound than those that were run.

        Args:
            least: The bound, in dB.
            first: Whether these are the first few.
        """
        worst = min(self.found, key=lambda each: each.rank_at(least), default=None)
        if worst is None or worst.sqnr is None:
            return first
        if first:
            return worst.sqnr >= HOPELESS or not worst.lost(least)
        return abs(worst.sqnr - least) <= _NEAR

    def verdicts(self) -> list[Verdict]:
        """Return a verdict of each part that can be compared: over all samples, where it is lost, or the usual ones."""
        bound = _OUTLYING * float(np.median(self._peaks))
        usual = [index for index, peak in enumerate(self._peaks) if not bound or peak <= bound]
        found = []
        for part in self.parts:
            verdict = verdict_of(part, list(self._pairs(part, range(self.count))))
            if verdict is not None and not verdict.lost() and len(usual) < self.count:
                verdict = verdict_of(part, list(self._pairs(part, usual))) or verdict
            found.append(verdict)
        return [verdict for verdict in found if verdict is not None]

    def _pairs(self, part: OutputPart, samples: Sequence[int]) -> Iterator[Pair]:
        for index in samples:
            keys = [(which, index, part.tensor) for which in (0, 1)]
            if all(key in self._store for key in keys):
                x, y = (self._store[key] for key in keys)
                # Of another shape, the whole tells so.
                yield (part.of(x), part.of(y)) if x.shape == y.shape else (x, y)
