"""Scores of outputs: how a unit of error in what a layer gives changes the distribution that the model gives.

    g = d log p(label) / d y,   label drawn from p itself
    G = sum over tokens of g g^T,  (out, out),   shrunk as far as it is noise: `core/solvers/coupled.py`

Both `ScorePasses` through the float model keep the scores of what each block gives; when its turn comes, each block
runs once more on the float model's inputs, and hands them down to its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.base.memory_and_disk import available_memory, free_disk
from quark.core.solvers.columns.columns import compiles
from quark.core.solvers.coupled import shrunk, trace_and_square
from quark.core.spec import TensorSpec
from quark.errors import ConfigError, NonFiniteError, NotSupportedError
from quark.torch.algorithms.base import Algorithm, Block
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.input_group import flat
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.algorithms.score_passes import ScorePasses, without_gradients
from quark.torch.calibration.distributed import from_first, in_order, world
from quark.torch.layers import QuantLayer
from quark.torch.model.batches import hidden_width, to_device, tokens_in
from quark.torch.model.blocks import WHOLE

SHARE = 0.5
"""Of the room that is free, so much at most is for scores that were not asked for: solvers need some, too."""


class OutputScores(ScorePasses):
    """The scores of what each block gives, for each batch.

    Args:
        model: The float model; not changed.
        blocks: Names of its blocks, in running order.
        data: Calibration batches.
        weights: Brings and takes the weights of blocks.
        store: Where the scores lie, as large as the hidden states after all blocks.
        needs_logits: Whether a model without logits is refused; else its loss is the squared error of its output.

    Raises:
        NotSupportedError: The model has no list of blocks, or gives no logits where they are needed.
        NonFiniteError: Scores hold NaN or Inf; names the block.
    """

    keeps_scores = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        data: Sequence[Any],
        weights: BlockWeights,
        store: PassStore,
        needs_logits: bool = False,
    ) -> None:
        super().__init__(model, blocks, data, weights, store)
        self.needs_logits = needs_logits
        if WHOLE in blocks:
            raise NotSupportedError(f"{type(model).__name__} has no list of blocks, which fisher=True needs.")
        self.go_back("scores")
        store.drop(self.inputs_of(0))

    def of_block(self, block: Block) -> torch.Tensor:
        """G of what a float block gives, (channels, channels)."""
        index = self.names.index(block.name)
        self.store.drop(self.scores_of(index))
        scores = self.store.read(self.scores_of(index + 1))
        sums = _Sums(scores[0].shape[-1], block.place.device)
        for own in scores:
            sums.add([block.place.loaded(own)])
        return _shrunk([sums])[0]

    def of_layers(self, block: Block) -> dict[str, torch.Tensor]:
        """Full name of each quantized linear layer of a float block -> G, of those that outputs depend on."""
        leaves = sorted({leaf for group in block.groups for leaf in group})
        weights = {block.full(leaf): cast(torch.Tensor, block.layer(leaf).weight) for leaf in leaves}
        found = {name: _Sums(len(weight), weight.device) for name, weight in weights.items()}
        of_batch: dict[str, list[torch.Tensor]] = {name: [] for name in found}

        def watch(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(of_batch[name].append)  # type: ignore[no-untyped-call]

        index = self.names.index(block.name)
        scores = self.store.read(self.scores_of(index + 1))
        self.store.drop(self.scores_of(index))  # of a block that is finished: a killed run does not read it again
        calls = dict(zip(block.batches, block.float_calls or block.calls, strict=True))
        with ExitStack() as hooks, without_gradients(block.module), torch.enable_grad():
            for leaf in leaves:
                hook = partial(watch, block.full(leaf))
                hooks.enter_context(block.layer(leaf).register_forward_hook(hook))
            for turn in range(-(-len(self.data) // world())):
                if turn in calls:  # another process may have one more
                    call = calls[turn].loaded()
                    given = call.with_hidden(call.hidden.detach().requires_grad_()).run(block.module)
                    given.backward(to_device(scores[turn], given.device))  # type: ignore[no-untyped-call]
                for name, own in of_batch.items():
                    found[name].add(own)
                    own.clear()
        moments = zip(found.items(), _shrunk([*found.values()]), strict=True)
        return {name: shrunk_to for (name, sums), shrunk_to in moments if sums.any}


class _Sums:
    """The sums of the scores of outputs of so many channels.

    Attributes:
        products: sum g g^T.
        spread: sum |g|^4, and how many there are.
        any: Whether any is not 0; known when they are shrunk.
    """

    def __init__(self, channels: int, device: torch.device | None) -> None:
        self.products = torch.zeros(channels, channels, device=device)
        self.spread = torch.zeros(2, dtype=torch.float64, device=device)
        self.any = True

    def add(self, gradients: list[torch.Tensor]) -> None:
        """Add what a batch of each process gave, in the order of the data, so that sums are those of one process."""
        products, spread = torch.zeros_like(self.products), torch.zeros_like(self.spread)
        for rows in map(flat, gradients):
            rows = rows.float()
            products.addmm_(rows.T, rows)
            spread += torch.stack([rows.square().sum(1).double().square().sum(), spread.new_full((), len(rows))])
        for own, total in ((products, self.products), (spread, self.spread)):
            for part in in_order([own]):
                total += part

    def read(self) -> torch.Tensor:
        """All numbers that `shrunk` reads, float64."""
        return torch.cat([torch.stack(trace_and_square(self.products)).double(), self.spread])


def _shrunk(sums: Sequence[_Sums]) -> list[torch.Tensor]:
    """G of each, without what so few scores cannot tell; a device is waited for once."""
    if not sums:
        return []
    numbers, found = [own.read() for own in sums], []
    rows = torch.stack([row.to(numbers[0].device) for row in numbers]).tolist()
    for own, (trace, square, fourth, count) in zip(sums, rows, strict=True):
        own.any = trace != 0  # a sum of squares; NaN is not 0
        # An expert that no token reached has none.
        found.append(shrunk(own.products, fourth, int(count), (trace, square)) if count else own.products)
    return found


class ByScores(Algorithm):
    """An algorithm whose config says by `fisher` whether it weighs errors by scores of outputs; "auto": where possible.

    Attributes:
        scores: None where it does not.
    """

    tokens_per_channel: ClassVar[int]
    """Tokens for each channel of a hidden state, whose scores are found: of more, G hardly becomes better."""
    fewest_tokens: ClassVar[int] = 0
    """So many tokens at least: narrow layers gain by more than others for each channel."""
    needs_compiled: ClassVar[bool] = False
    """True where scores are of use only where the rounding of an element type is compiled."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.learns = bool(config.fisher)  # type: ignore[misc]
        self.scores: OutputScores | None = None

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        """Refuse what cannot be rounded element by element.

        Raises:
            ConfigError: The codes of a weight are quantized once more; names it.
        """
        self.blocks, chosen = blocks, self.config.inside_layer_modules
        for name, layer in layers.items():
            spec = layer.spec.weight
            named = not chosen or any(name.endswith(f".{leaf}") for leaf in chosen)
            if named and isinstance(layer, nn.Linear) and spec is not None and spec.code_spec is not None:
                raise ConfigError(
                    f"{type(self).__name__} rounds weights element by element, and the codes of {name} are quantized "
                    f"once more ({spec.dtype} to {spec.code_spec.dtype}). Possible: importance, or exclude the layer."
                )

    @property
    def name(self) -> str:
        """Its name in `algo_config`; with what it went by, where that was chosen."""
        return super().name if self.scores is None else f"{super().name} by Fisher information"

    def learned_bytes(self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> int:
        """Those of the scores, where they are asked for: chosen, they are only where there is room."""
        return scores_bytes(model, blocks, self.scored(model, data)) if self.config.fisher is True else 0

    def scored(self, model: nn.Module, data: Sequence[Any]) -> Sequence[Any]:
        """The first batches, as many as the moments of so wide an output need."""
        enough, counts = self.scored_tokens(model), accumulate(tokens_in([batch]) for batch in data)
        return data[: next((index for index, count in enumerate(counts, 1) if count >= enough), len(data))]

    def scored_tokens(self, model: nn.Module) -> float:
        """How many tokens are enough; where the width of the model is not known, none are."""
        width = hidden_width(model)
        return max(self.tokens_per_channel * width, self.fewest_tokens) if width else float("inf")

    def learn(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantLayer],
        data: Sequence[Any],
        weights: BlockWeights,
        work: Path | None,
    ) -> None:
        data = self.scored(model, data)
        if self.config.fisher == "auto":
            specs = [layer.spec.weight for layer in layers.values() if layer.spec.weight]
            compiled = specs if self.needs_compiled else []
            self.scores = _scores_if_possible(model, self.blocks, compiled, data, weights, work)
        else:
            self.scores = OutputScores(model, self.blocks, data, weights, PassStore(work, {}))


def scores_bytes(model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> int:
    """Bytes of the scores after all blocks, and of the moments of the widest layer with their factor.

    Args:
        model: With or without weights.
        blocks: Names of its blocks.
        data: Calibration batches, of known size where they are tokens.
    """
    here = [m for name in blocks for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)]
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    tokens = tokens_in(data) // world()
    return (len(blocks) + 1) * tokens * hidden_width(model) * size + 3 * 4 * max(m.out_features for m in here) ** 2


def _scores_if_possible(
    model: nn.Module,
    blocks: Sequence[str],
    specs: Sequence[TensorSpec],
    data: Sequence[Any],
    weights: BlockWeights,
    work: Path | None,
) -> OutputScores | None:
    """The scores; None, and a line of the log, where there is no room for them, the model has none, or there are specs
    and no weight of them is rounded by compiled code: one element after the other would take hours.
    """
    needed = scores_bytes(model, blocks, data)
    room = available_memory() if work is None else free_disk(work.parent)
    why = None
    if room is not None and needed > SHARE * room:
        why = f"they take {needed / 1e9:.2f} GB, and {room / 1e9:.2f} GB are free"
    elif specs and not any(map(compiles, specs)):
        why = "no compiler, or none of the element types is compiled"
    elif tokens_in(data) == 0:
        why = "the size of the data is not known"
    why = from_first(why)  # what is free differs between processes
    if why is None:
        try:
            return OutputScores(model, blocks, data, weights, PassStore(work, {}), needs_logits=True)
        except (NotSupportedError, NonFiniteError) as error:
            why = str(error)
    logger.info("Rounded without Fisher information of outputs: %s", why)
    return None
