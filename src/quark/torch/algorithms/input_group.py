"""The input of linear layers that read one tensor, for all batches, and the statistics that algorithms read of it.

Where several processes have a part of the batches each, every statistic is that of one process to the bit: floating
sums depend on their order, so they are taken over all batches in the order of the data. Of second moments each process
adds up some rows, over all batches; of what has one value for each channel, the sums of each batch are exchanged.

Float32 matrices whose values are bfloat16 are multiplied by the units that multiply bfloat16: the same, and faster.

    a b = sum of products of 8-bit significands, each exact in float32; the sum is one in float32 either way

The second moments of the inputs of a bfloat16 model are such products, and the largest part of an algorithm's work
where there is much data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.base.memory_and_disk import give_back_memory
from quark.core.checks import all_finite, check
from quark.core.kernels import products
from quark.core.solvers.columns.halves import add_product
from quark.errors import CalibrationError, NonFiniteError, StructureError
from quark.torch.calibration.distributed import from_owner, in_order, largest, owner_of, rank, summed, world
from quark.torch.calibration.spill import Waiting

TILE = 512
"""Channels of a tile of second moments."""
TOKENS = 2048
"""Tokens that are converted to float32 at once."""


def statistic(find: Callable[[InputGroup], Any]) -> Any:
    """A property that is found when it is read first."""

    def get(group: InputGroup) -> Any:
        if find.__name__ not in group.statistics:
            group.statistics[find.__name__] = find(group)
        return group.statistics[find.__name__]

    return property(get, doc=find.__doc__)


class InputGroup:
    """A group of linear layers that read one tensor, and that tensor for every batch.

    Attributes:
        layers: Full name -> layer; all have the same in_features.
        inputs: One tensor for each batch, shape (..., in_features), as it waits: `waiting.load` has its values.
        float_inputs: The same in the float model, where an algorithm asked for it, else empty.
        go_on: Lets the float batches run on, which wait for nothing but the others.
        waiting: Where inputs are, which may lie in a file or in the memory of the host.
        statistics: What was found of the inputs, by name.
        numbers: Which batches of this process the inputs are of; None: all.
        shared: Whether other groups that read the same inputs have the same statistics: experts that read all tokens.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Linear],
        inputs: list[torch.Tensor],
        float_inputs: list[torch.Tensor],
        go_on: Callable[[], None] = lambda: None,
        waiting: Waiting | None = None,
        statistics: dict[Any, Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.numbers = numbers
        self.statistics: dict[Any, Any] = {} if statistics is None else statistics
        self.shared = statistics is not None
        self.layers, self.inputs, self.float_inputs = dict(layers), inputs, float_inputs
        self.go_on, self.waiting = go_on, waiting or Waiting()

    def __str__(self) -> str:
        return ", ".join(self.layers)

    @property
    def device(self) -> torch.device:
        """Where the layers compute."""
        return next(iter(self.layers.values())).weight.device

    def in_turn(self, inputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Inputs of all processes where the layers compute, one at a time, in the order of the data."""
        # What runs after the blocks may be on another device than what it reads, until it runs.
        return (x.to(self.device) for x in in_order(inputs, self.waiting.load, self.device, self.numbers))

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], name: Any = None) -> InputGroup:
        """The group with each input changed; `name` says what of, where statistics are shared."""
        inputs = [self.waiting.leave(change(self.waiting.load(x))) for x in self.inputs]
        statistics = self.statistics.setdefault(name, {}) if self.shared and name is not None else None
        return InputGroup(self.layers, inputs, self.float_inputs, self.go_on, self.waiting, statistics, self.numbers)

    def found(self, name: Any, find: Callable[[], Any]) -> Any:
        """Return the result of `find`; where statistics are shared, it is kept with them under that name."""
        if not self.shared:
            return find()
        if name not in self.statistics:
            self.statistics[name] = find()
        return self.statistics[name]

    @statistic
    def count(self) -> int:
        """Tokens that reach the layers."""
        tokens = sum(x.numel() // x.shape[-1] for x in self.inputs)
        return int(summed(torch.tensor(tokens)))

    @statistic
    def gram(self) -> torch.Tensor:
        """Second moments X^T X / count, shape (in_features, in_features), float32.

        Raises:
            CalibrationError: No token reaches the layers (an expert that was never chosen).
            NonFiniteError: An input holds NaN or Inf.
        """
        return self._moments(self.inputs, self.inputs)

    @statistic
    def mean_square(self) -> torch.Tensor:
        """The diagonal of `gram`, shape (in_features,), float32, without the products that are not on it.

        Raises: As `gram` does.
        """
        self._require_tokens()
        total = torch.zeros(self.inputs[0].shape[-1], dtype=torch.float32, device=self.device)
        squares = (
            torch.stack([tokens.float().square().sum(0) for tokens in torch.split(flat(x), TILE)])
            for x in map(self.waiting.load, self.inputs)
        )
        for of_batch in in_order(squares, numbers=self.numbers):
            for of_tokens in of_batch:
                total += of_tokens
        total /= self.count
        self._require_finite(total)
        return total

    @statistic
    def cross(self) -> torch.Tensor:
        """X~^T X / count of the real inputs X~ and those of the float model X."""
        return self._moments(self.inputs, self.float_inputs)

    def drift(self, order: torch.Tensor, above: bool = False) -> torch.Tensor:
        """(X - X~)^T X~ / count, (in_features, in_features): made for the caller, who may overwrite it.

        Args:
            order: Of the channels, by which rows and columns stand.
            above: Whether what is below the diagonal is not needed, half of the work; it is then not to be read.
        """
        total = self._moments(self.float_inputs, self.inputs, order=order, upper=above)
        for start in range(0, len(order), TILE):
            here, first = slice(start, start + TILE), start if above else 0
            total[here, first:] -= self.gram[order[here]].index_select(1, order[first:])
        return total

    def cross_bands(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of `cross`, some at a time, for what does not need them all at once: (which, they).

        Several processes make it whole, for they would exchange all inputs for each band.
        """
        whole = self.cross if world() > 1 else None
        width = self.inputs[0].shape[-1]
        for start in range(0, width, TILE):
            rows = slice(start, min(start + TILE, width))
            yield rows, self._moments(self.inputs, self.float_inputs, rows) if whole is None else whole[rows]
            give_back_memory()

    def drift_of_outputs(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """X~^T (X - X~) W^T / count of each weight, from what its outputs drift: (in_features, rows), float32.

        Where inputs are bfloat16, X - X~ and the drift are rounded to it on the way where that is faster: as if each
        output had a noise of less than 2^-8 of its drift, of which a regression on X~ finds less still.

        Args:
            weights: Name -> weight, shape (rows, in_features), where the layers compute.

        Raises: As `gram` does, for both inputs.
        """
        self._require_tokens()
        self._require_same_tokens(self.inputs, self.float_inputs)
        width, rounded = self.inputs[0].shape[-1], self.inputs[0].dtype is torch.bfloat16 and products.serves(self.gram)
        found = {name: self.gram.new_zeros(width, len(weight)) for name, weight in weights.items()}
        tiles = [
            (found[name][:, start : start + TILE], weight[start : start + TILE])
            for name, weight in weights.items()
            for start in range(0, len(weight), TILE)
        ]
        owners = _rows_of_ranks(range(len(tiles)))
        for both in zip(*(self.in_turn(side) for side in (self.inputs, self.float_inputs)), strict=True):
            for x, y in zip(*(torch.split(flat(side), TOKENS) for side in both), strict=True):
                real = x.float()
                drift = y.float() - real
                for tile, weight in (tiles[index] for index in owners[rank()]):
                    outputs = real.new_zeros(len(real), len(weight))
                    add_product(outputs, drift, weight.float().T, 1, rounded)
                    outputs /= self.count
                    add_product(tile, real.T, outputs, 1, rounded)
        for owner, indices in enumerate(owners):
            for index in indices:
                from_owner(tiles[index][0], owner)
                self._require_finite(tiles[index][0])
        return found

    @statistic
    def max_abs(self) -> torch.Tensor:
        """Largest magnitude of each channel, shape (in_features,), float32."""
        self._require_tokens()
        none = torch.zeros(self.inputs[0].shape[-1], dtype=self.inputs[0].dtype, device=self.device)
        largest_here = (flat(x).abs().amax(0) for x in map(self.waiting.load, self.inputs) if x.numel())
        seen_here = torch.stack([none, *largest_here]).amax(0)
        return largest(seen_here.float())

    @statistic
    def mean_abs(self) -> torch.Tensor:
        """Mean magnitude of each channel, shape (in_features,), float32."""
        self._require_tokens()
        magnitudes = (flat(x).abs().sum(0, dtype=torch.float32) for x in map(self.waiting.load, self.inputs))
        return torch.stack(list(in_order(magnitudes, numbers=self.numbers))).sum(0) / self.count

    def rescale(self, scale: torch.Tensor) -> None:
        """Divide channel i of all inputs by scale[i]: what a fold into the producer does to them."""
        self.inputs = self.changed(lambda x: x / scale.to(x)).inputs
        self.statistics, self.shared = {"count": self.count}, False

    def forget(self, *names: str) -> None:
        """Free statistics; they are collected again where they are read again."""
        for name in names:
            self.statistics.pop(name, None)

    def forget_float(self) -> None:
        """Free the float inputs and what followed from them: nothing reads them any more."""
        self.forget("cross")
        self.float_inputs.clear()  # not replaced: `_meet` and `as_read` have this list too
        self.go_on()
        give_back_memory()

    def _require_same_tokens(self, left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
        if [x.shape for x in left] == [y.shape for y in right]:
            return
        rows, others = (sum(x.numel() // x.shape[-1] for x in side) for side in (left, right))
        raise StructureError(
            f"{self}: the float model gives these layers {others} tokens where this one gives {rows} (another "
            "choice of experts?), so they cannot be compared. Possible: exclude them, or an algorithm that does "
            "not compare (GPTQ)."
        )

    def _moments(
        self,
        left: Sequence[torch.Tensor],
        right: Sequence[torch.Tensor],
        band: slice | None = None,
        order: torch.Tensor | None = None,
        upper: bool = False,
    ) -> torch.Tensor:
        """Left^T right / count, of all channels of `left`, or of a band of them that begins with a tile.

        Args:
            left, right: Inputs of each batch.
            band: Of the channels of `left`; None: all.
            order: In which the channels of both stand; None: as they are.
            upper: Whether what is below the diagonal is not found; of `left` with itself it is the same, and filled in.
        """
        self._require_tokens()
        width = left[0].shape[-1]
        channels = range(width)[band or slice(width)]
        total = torch.zeros(len(channels), width, dtype=torch.float32, device=self.device)
        self._require_same_tokens(left, right)
        tiles, same = _rows_of_ranks(range(0, len(channels), TILE)), left is right
        upper = upper or same
        loaded, others_loaded = (self.in_turn(side) for side in (left, right))
        for x, y in ((x, x) for x in loaded) if same else zip(loaded, others_loaded, strict=True):
            with exact_in_bfloat16(x, y):
                for some, other in zip(torch.split(flat(x), TOKENS), torch.split(flat(y), TOKENS), strict=True):
                    some, other = (x if order is None else x.index_select(1, order) for x in (some, other))
                    mine = some[:, channels.start : channels.stop]
                    _add_moments(total, tiles[rank()], mine, None if same else other, 1 / self.count, upper)
        for owner, starts in enumerate(tiles):
            for start in starts:
                from_owner(total[start : start + TILE, start if upper else 0 :], owner)
        if same:
            _mirror(total)
        self._require_finite(total)
        return total

    def _require_finite(self, moments: torch.Tensor) -> None:
        failure = NonFiniteError(f"{self}: an input holds NaN or Inf, or values too large to square.")
        check(all_finite(*moments.aminmax()), failure)

    def _require_tokens(self) -> None:
        if self.count == 0:
            raise CalibrationError(no_tokens(str(self)))


def _add_moments(
    total: torch.Tensor, starts: Iterable[int], x: torch.Tensor, y: torch.Tensor | None, share: float, upper: bool
) -> None:
    """Add share * x^T y to the tiles of `total` that start at these rows, or to what of them is not below the diagonal.

    Without y, it is x. One product for each tile, so that it has the same bits whoever takes it.
    """
    compiled = _setting() is None and products.fits(total, x, x if y is None else y)
    tokens = x if compiled else x.float()
    others = tokens if y is None else y if compiled else y.float()
    for start in starts:
        first = start if upper else 0
        tile, left = total[start : start + TILE, first:], tokens[:, start : start + TILE]
        if compiled:
            products.add_products(tile, left, others[:, first:], share, upper)
        else:
            tile.addmm_(left.T, others[:, first:], alpha=share)


def _rows_of_ranks(starts: Sequence[int]) -> list[list[int]]:
    """Which tiles of rows each rank takes."""
    return [[start for index, start in enumerate(starts) if owner_of(index) == owner] for owner in range(world())]


def _mirror(matrix: torch.Tensor) -> None:
    """Copy the upper half of a matrix to its lower half, tile by tile: no second matrix is made."""
    for start in range(0, len(matrix), TILE):
        stop = start + TILE
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).T)
        matrix[stop:, start:stop] = matrix[start:stop, stop:].T


def no_tokens(layers: str) -> str:
    """Return an error for layers that read nothing, and what to do."""
    return (
        f"{layers}: no calibration token reaches these layers (experts that the router never chose?). "
        "Use more or other data, or exclude them."
    )


def flat(x: torch.Tensor) -> torch.Tensor:
    """All tokens as rows, shape (tokens, features)."""
    return x.reshape(-1, x.shape[-1])


# Exact products -------------------------------------------------------------------------------------------------------


@contextmanager
def exact_in_bfloat16(*operands: torch.Tensor) -> Iterator[None]:
    """Within: products on a CPU may round their operands to bfloat16, if these are all of that type.

    The setting is the process's, so nothing but such products belongs inside. PyTorch before 2.9 has none that is the
    CPU's alone; there, and where the processor has no tiles (AMX), products are as ever, or those of
    `core/kernels/products.py`: through PyTorch, the bfloat16 instructions of AVX-512 gain nothing here.

    Args:
        operands: What is multiplied, in the type in which it came.
    """
    setting = _setting()
    if setting is None or any(x.dtype is not torch.bfloat16 or x.device.type != "cpu" for x in operands):
        yield
        return
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _setting() -> Any:
    """PyTorch's precision of products by oneDNN, the library of its CPU kernels; None where it would gain nothing."""
    if not _has_tiles():
        return None
    of_products = getattr(torch.backends.mkldnn, "matmul", None)
    return of_products if hasattr(of_products, "fp32_precision") else None


def _has_tiles() -> bool:
    """Return True where the processor multiplies tiles of bfloat16."""
    # PyTorch has a public name in its latest versions only; this one is there wherever the setting is.
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
