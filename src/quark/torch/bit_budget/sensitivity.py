"""The table of sensitivities: what layers lose and weigh under each candidate; a budget then costs no data.

least sum of losses   subject to   sum of bytes <= budget        exactly, by core/solvers/choices/knapsack.py

Runtimes may need one scheme for layers: those that a server makes one of are found as the blocks of a model run.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from quark.__version__ import __version__
from quark.base.files import atomic_file, require_regular
from quark.base.json_objects import plain_json
from quark.core.solvers.choices.knapsack import cheapest_choice
from quark.errors import ConfigError, FormatError, did_you_mean
from quark.torch.algorithms.layer_inputs import input_groups
from quark.torch.calibration.experts import EXPERT
from quark.torch.config.config import QConfig, QLayerConfig
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.flows.resume import fingerprint_of_data
from quark.torch.formats.fused_groups import FusedGroup, by_table, mixtures_of, united
from quark.torch.model.blocks import Call

KIND = "quark sensitivity"
KNEE, STEPS = 1.3, 12
"""How many times the bits of a choice are looked at for what a little more gains, and at how many budgets."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that get the same scheme.

    Attributes:
        layers: Full names.
        weights: Elements of their weights.
        sizes: Candidate -> bytes that the layers take; only candidates that fit all of them.
        losses: Candidate -> divergence of the outputs, in nats for each position, to second order.
    """

    layers: tuple[str, ...]
    weights: int
    sizes: Mapping[str, int]
    losses: Mapping[str, float]


@dataclass(frozen=True)
class AskedBudget:
    """A budget as it is asked for.

    Attributes:
        bits: For each weight of the layers that are chosen for; None: size.
        size: Bytes of the whole checkpoint; None: bits.

    Raises:
        ConfigError: Not one of both, or no number.
    """

    bits: float | None
    size: int | None

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.size is None):
            raise ConfigError(f"A budget is bits or size, one of both; got bits={self.bits}, size={self.size}.")
        if self.bits is not None and not math.isfinite(self.bits):
            raise ConfigError(f"A budget in bits is a number, as in 4.25; got {self.bits}.")

    def bytes(self, weights: int, rest: int) -> int:
        """Return the bytes for the layers that are chosen for: they have `weights` elements, all else `rest` bytes."""
        return math.floor(self.bits * weights / 8) if self.bits is not None else (self.size or 0) - rest

    def check(self, least: int, most: int, weights: int, rest: int) -> None:
        """Raise ConfigError where the layers cannot take so little (`least` bytes), or would not take so much."""
        budget = self.bytes(weights, rest)
        if least <= budget <= most:
            return

        def shown(used: int) -> str:
            if self.bits is not None:
                return f"{8 * used / weights:.4g} bits"
            return f"{(used + rest) / 1e6:.2f} MB"

        asked = f"{self.bits:g} bits" if self.bits is not None else f"{(self.size or 0) / 1e6:.2f} MB"
        which = "below the smallest" if budget < least else "above the largest"
        raise ConfigError(
            f"A budget of {asked} is {which} choice. Possible with these candidates: {shown(least)} to {shown(most)}."
        )


SOLVED = 0.4
"""Share of a predicted loss that solvers leave. Measured: .36 and .38 of a model of 135 million parameters at 3.5 bits
with Qronos, .42 to .48 of the example language model at 3.5 to 5 bits with GPTQ (docs/guide/bit_budget.md).
"""


@dataclass(frozen=True)
class BudgetChoice:
    """A scheme for each group.

    Attributes:
        schemes: Full name of a layer -> candidate.
        size: Bytes of the whole checkpoint.
        bits: Bits for each weight of the layers that were chosen for, scales and zero points included.
        loss: Sum of the losses to nearest, in nats for each position.
    """

    schemes: dict[str, str]
    size: int
    bits: float
    loss: float

    @property
    def solved(self) -> float:
        """The loss where a solver rounds the weights, and not to nearest; by what was measured of other models."""
        return SOLVED * self.loss


@dataclass(frozen=True)
class SensitivityTable:
    """The table of a model.

    Attributes:
        model: Fingerprint of its weights; of a folder also of what is excluded, and of the format.
        data: Fingerprint of the calibration data.
        candidates: Names of schemes.
        groups: All layers that a scheme is chosen for.
        rest: Bytes of all else in the checkpoint: embeddings, head, norms.
    """

    model: str
    data: str
    candidates: tuple[str, ...]
    groups: tuple[LayerGroup, ...]
    rest: int

    def choose(
        self, *, bits: float | None = None, size: int | None = None, candidates: tuple[str, ...] | None = None
    ) -> BudgetChoice:
        """The schemes that lose least within a budget.

        Args:
            bits: For each weight of the layers that are chosen for, scales and zero points included.
            size: Bytes of the whole checkpoint, embeddings and head included.
            candidates: Only these.

        Raises:
            ConfigError: Not one of both, an unknown candidate, or a budget below the smallest or above the largest
                choice; says what they are.
        """
        asked = AskedBudget(bits, size)
        named = self._require_candidates(candidates)
        options = [[name for name in named if name in group.sizes] for group in self.groups]
        for group, possible in zip(self.groups, options, strict=True):
            if not possible:
                raise ConfigError(
                    f"None of the candidates {', '.join(named)} fits {', '.join(group.layers[:3])}. Possible: "
                    f"{', '.join(group.sizes)}."
                )
        sizes = [[group.sizes[name] for name in names] for group, names in zip(self.groups, options, strict=True)]
        losses = [[group.losses[name] for name in names] for group, names in zip(self.groups, options, strict=True)]
        # More bytes than those of the best candidate of each group are of no use.
        most = sum(min(zip(row, used, strict=True))[1] for row, used in zip(losses, sizes, strict=True))
        asked.check(sum(map(min, sizes)), most, self.weights, self.rest)
        picked = cheapest_choice(sizes, losses, asked.bytes(self.weights, self.rest))
        schemes = {
            layer: names[i]
            for group, names, i in zip(self.groups, options, picked, strict=True)
            for layer in group.layers
        }
        used = sum(row[i] for row, i in zip(sizes, picked, strict=True))
        loss = math.fsum(row[i] for row, i in zip(losses, picked, strict=True))
        return BudgetChoice(schemes, used + self.rest, 8 * used / self.weights, loss)

    @property
    def weights(self) -> int:
        """Elements of the weights that are chosen for."""
        return sum(group.weights for group in self.groups)

    def uniform(self, candidate: str) -> BudgetChoice | None:
        """One candidate for all layers; None where it does not fit one."""
        if any(candidate not in group.sizes for group in self.groups):
            return None
        used = sum(group.sizes[candidate] for group in self.groups)
        loss = math.fsum(group.losses[candidate] for group in self.groups)
        layers = {layer: candidate for group in self.groups for layer in group.layers}
        return BudgetChoice(layers, used + self.rest, 8 * used / self.weights, loss)

    def knee(self, choice: BudgetChoice) -> BudgetChoice | None:
        """A larger choice that loses much less: of STEPS budgets up to KNEE times the bits, the one that removes most
        of the logarithm of the loss for each byte more; None where none halves the loss.
        """
        best, most = None, 0.0
        for i in range(1, STEPS + 1):
            try:
                other = self.choose(bits=choice.bits * (1 + (KNEE - 1) * i / STEPS))
            except ConfigError:  # above the largest choice
                break
            if other.size > choice.size and 0 < other.loss <= choice.loss / 2:
                gain = math.log(choice.loss / other.loss) / (other.size - choice.size)
                best, most = (other, gain) if gain > most else (best, most)
        return best

    def config(self, choice: BudgetChoice, base: QConfig) -> QConfig:
        """`base` with the schemes of a choice, after the layers that it names itself.

        The scheme of most weights is the global one, and the others are named.
        """
        count: Counter[str] = Counter()
        for group in self.groups:
            count[choice.schemes[group.layers[0]]] += group.weights
        common = count.most_common(1)[0][0]
        named: dict[str, QLayerConfig] = {}
        for group in self.groups:
            scheme, expert = choice.schemes[group.layers[0]], EXPERT.fullmatch(group.layers[0])
            patterns = [f"{expert['block']}.*"] if expert else group.layers  # a mixture may have thousands of layers
            if scheme != common:
                named |= {pattern: LLMTemplate.scheme(scheme) for pattern in patterns}
        return replace(
            base,
            global_quant_config=LLMTemplate.scheme(common),
            layer_quant_config={**base.layer_quant_config, **named},
        )

    def _require_candidates(self, candidates: tuple[str, ...] | None) -> tuple[str, ...]:
        for name in candidates or ():
            if name not in self.candidates:
                raise ConfigError(
                    f"The candidate {name!r} is not in this table. {did_you_mean(name, self.candidates)} Or measure "
                    "again, into another file."
                )
        return candidates or self.candidates

    def save(self, file: Path) -> None:
        """Write the table as JSON."""
        with atomic_file(file) as path:
            head = {"kind": KIND, "quark": __version__, "number_of_layers": _layers_of(self.groups)}
            path.write_text(json.dumps({**head, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> SensitivityTable:
        """Read what `save` wrote. Raises FormatError for anything else."""
        require_regular(file)
        try:
            stored = plain_json(file.read_text(encoding="utf-8"))
            if stored["kind"] != KIND:
                raise ValueError(f"its kind is {stored['kind']!r}")
            groups = tuple(_group(entry) for entry in stored["groups"])
            if stored.get("number_of_layers", _layers_of(groups)) != _layers_of(groups):  # a table of 1.0 has no number
                raise ValueError(f"its groups have {_layers_of(groups)} layers of {stored['number_of_layers']!r:.40}")
            candidates = tuple(str(name) for name in stored["candidates"])
            table = cls(str(stored["model"]), str(stored["data"]), candidates, groups, _count(stored["rest"], least=0))
        except OSError as error:
            raise FormatError(f"{file} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(f"{file} is no table of sensitivities: {error}.") from None
        if not groups or any(
            not group.layers or not group.sizes or group.sizes.keys() != group.losses.keys() for group in groups
        ):
            raise FormatError(f"{file} is no table of sensitivities: a group of layers is incomplete.")
        return table

    def check(self, model: str, data: Sequence[Any] | None) -> None:
        """Raise ConfigError where the table is of another model, or of other data (None: not given)."""
        if self.model != model:
            raise ConfigError(
                "The table of sensitivities was measured with another model, other excluded layers, another format, or "
                "another program, which fuses other layers. Possible: another file."
            )
        if data is not None and self.data != fingerprint_of_data(data):
            raise ConfigError(
                "The table of sensitivities was measured with other calibration data. Possible: the same data, none, "
                "or another file."
            )


def _layers_of(groups: Sequence[LayerGroup]) -> int:
    return sum(len(group.layers) for group in groups)


def _group(entry: Mapping[str, Any]) -> LayerGroup:
    sizes = {str(name): _count(value) for name, value in entry["sizes"].items()}
    losses = {str(name): float(value) for name, value in entry["losses"].items()}
    if not all(0 <= value < 1 << 53 for value in losses.values()):  # their sums stay finite, and NaN is in no range
        raise ValueError("a loss is negative, beyond what a model can lose, or no number")
    return LayerGroup(tuple(map(str, entry["layers"])), _count(entry["weights"]), sizes, losses)


def _count(value: object, least: int = 1) -> int:
    """A number of bytes or elements, whose sums stay in 64 bits. Raises ValueError."""
    if type(value) is not int or not least <= value < 1 << 53:
        raise ValueError(f"{value!r:.40} is no number of bytes or elements")
    return value


# Layers with one scheme -----------------------------------------------------------------------------------------------


def groups_in_block(
    name: str,
    block: nn.Module,
    layers: Collection[str],
    call: Call,
    known_as: Collection[str],
    programs: Sequence[str],
) -> list[list[str]]:
    """The layers of a block in groups.

    Args:
        name: Of the block.
        block: With weights, and its hooks as they are.
        layers: Full names of the layers to group.
        call: Of the block.
        known_as: The architectures of the model.
        programs: Servers; what one of them makes one of has one scheme.

    Returns:
        Full names. A layer that is made one with no other is a group of its own, and so is one whose name no table
        knows, and which this call does not reach.
    """
    mixtures = list(mixtures_of(layers).values())
    experts = set(chain.from_iterable(mixtures))
    prefix = f"{name}."
    single = [layer for layer in layers if layer.startswith(prefix) and layer not in experts]
    found, unknown = by_table(single, known_as, programs)
    for module, leaves in unknown:
        inside = [f"{module}.{leaf}".removeprefix(prefix) for leaf in leaves]
        parts = (tuple(prefix + leaf for leaf in group) for group in input_groups(block, inside, call))
        found += [FusedGroup(part, "") for part in parts]
    groups = [list(group.layers) for group in united(found, single)]
    grouped = set(chain.from_iterable(groups))
    groups += [[layer] for layer in single if layer not in grouped]
    order = {layer: index for index, layer in enumerate(single)}
    return [*sorted(groups, key=lambda group: order[group[0]]), *mixtures]
