"""Rotation (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456; SpinQuant, Liu et al. 2024, arXiv:2405.16406).

    R1   stream x <- x Q: norms folded, Q^T into what writes the stream, Q into what reads it; or online, x Q in each
         forward before the layers that read a norm
    R2   values of each head, folded into the value and output projections
    R3   queries and keys after their rotary embedding, online
    R4   the input of the down projection, online, its inverse in the weight

An orthonormal Q spreads an outlier over all channels of its block and changes nothing else. Each change is made to a
float64 copy of one block first and must leave what that computes as it was; only then are the model's weights changed.

`ModelRotation(model, config).rotate()` does it to a whole model. With one block in memory at a time its parts are
called by themselves: `rotate_embeddings`, `rotate_block` for each block, `rotate_head`, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.base.log import logger
from quark.base.progress import progress
from quark.core.checks import naming
from quark.core.solvers.hadamard import Rotation
from quark.errors import ConfigError, NotSupportedError, StructureError
from quark.torch.algorithms.base import Algorithm
from quark.torch.algorithms.block_weights import BlockWeights
from quark.torch.algorithms.rotation.block import R1_SEED, BlockPlan, plan_block, prove_block
from quark.torch.algorithms.rotation.cayley import MatrixRotation
from quark.torch.algorithms.rotation.fold import Turning, rotate_readers, rotate_writers
from quark.torch.algorithms.rotation.frame import (
    FRAME,
    Frame,
    blocks_path,
    find_frame,
    frame_residual,
    given_residuals,
    given_targets,
    rerun_frame,
)
from quark.torch.algorithms.rotation.spinquant import learn_rotations
from quark.torch.config.algo_configs import AlgoConfig, RotationConfig
from quark.torch.layers import QuantLayer
from quark.torch.model.batches import input_device
from quark.torch.model.record_forward import is_linear
from quark.torch.model.residual_stream import Residual
from quark.torch.model.tied_weights import tying_configs

TOLERANCE = 1e-5
"""Largest relative change of what embeddings and head compute: their norm may compute in float32."""


class ModelRotation:
    """A rotation of one model.

    Args:
        model: A model of token ids with a list of blocks, in float; its linear layers may be replaced by quantized
            ones already, whose scales are not found yet. Only those are rotated online then. Its embeddings, head and
            first block are loaded; other blocks may be on the meta device until their turn.
        config: What to rotate.

    Attributes:
        stream: Q of R1 if it is folded, else None. It depends on nothing but the config, the width of the stream and
            whether the norms subtract the mean: then Q keeps the mean.

    Raises:
        NotSupportedError: Learned smoothing.
        ConfigError: A name or size does not fit the model.
        StructureError: A part of the model is not found.
    """

    def __init__(self, model: nn.Module, config: RotationConfig) -> None:
        _check_supported(config)
        self.model, self.config = model, config
        self.frame = find_frame(model, config)
        self.folded: Rotation | None = None
        self.targets = _listed_targets(model, config, self.frame.blocks)
        self.given: Mapping[str, Residual] = {}
        self.residual = Residual()
        self.stream: Turning | None = None
        if config.r1 and not config.online_r1_rotation:
            self.given = given_residuals(model, config, self.frame.blocks)
            self.residual = self.given[FRAME] if self.given else frame_residual(model, self.frame)
            _refuse_shared_tables(model, self.frame, self.residual)
            size = config.rotation_size or self.frame.width
            if self.frame.width % size:
                raise ConfigError(
                    f"rotation_size={size} does not divide the {self.frame.width} features of the stream."
                )
            self.folded = Rotation(size, R1_SEED if config.random_r1 else None, self.residual.centred)
            self.stream = self.folded

    def rotate(self) -> dict[str, BlockPlan]:
        """Rotate the whole model; what was done to each block. Everything is proved before the first weight changes.

        Raises:
            StructureError: A part is not found, or a change would alter what the model computes; it is as it was.
        """
        names = self.frame.blocks
        plans = {name: self.plan(name) for name in progress(names, "prove rotation", total=len(names))}
        if (self.config.r4 or self.config.online_r1_rotation) and not any(plan.online for plan in plans.values()):
            what = "r4" if self.config.r4 else "online_r1_rotation"
            raise StructureError(
                f"{what}=True: no linear layer that it rotates is found or quantized (fused experts hold none). "
                f"Possible: {what}=False."
            )
        self._apply(plans)
        return plans

    def rotate_further(self, stream: MatrixRotation | None, plans: Mapping[str, BlockPlan]) -> None:
        """Rotate the whole model, which is rotated already, by matrices that were learned; proved likewise."""
        given, results = rerun_frame(self.model, self.frame)
        self.frame = replace(self.frame, given=given, results=results)
        self.stream = stream
        for name, plan in plans.items():
            with naming(name):
                block = self.model.get_submodule(name)
                prove_block(block, self.frame.calls[name][0].to(input_device(block)), plan)
        self._apply(plans)

    def _apply(self, plans: Mapping[str, BlockPlan]) -> None:
        if self.stream is not None:
            with self._restoring():
                self.rotate_embeddings()
                self.rotate_head()
                self._prove_frame()
        for name, plan in plans.items():
            plan.apply(self.model.get_submodule(name))

    def rotate_block(self, name: str) -> None:
        """Rotate one loaded block, proved before. `name` is its full name, of `frame.blocks`."""
        self.plan(name).apply(self.model.get_submodule(name))

    def rotate_embeddings(self) -> None:
        """R1 of what writes the stream before the first block. A head that shares their weight gets its own."""
        if self.stream is not None:
            self._untie()
            rotate_writers(self.model, self.residual, self.stream)

    def rotate_head(self) -> None:
        """R1 of the final norm and of the head that reads it."""
        if self.stream is not None:
            self._untie()
            rotate_readers(self.model, self.residual, self.stream)

    def plan(self, name: str) -> BlockPlan:
        """Return the plan of a block, proved on a float64 copy of it."""
        block = self.model.get_submodule(name)
        few, many = self.frame.calls[name]
        calls = few.to(input_device(block)), many.to(input_device(block))
        inside = None
        if self.targets is not None:
            inside = [target[len(name) + 1 :] for target in self.targets if target.startswith(f"{name}.")]
        with naming(name):
            plan = plan_block(block, calls, self.config, self.folded, self.given.get(name), inside)
            prove_block(block, calls[0], plan)
        return plan

    def _prove_frame(self) -> None:
        assert self.stream is not None
        given, results = rerun_frame(self.model, self.frame)
        pairs = [("embeddings", given, self.stream.apply(self.frame.given.double()))]
        pairs += [("output head", a, b.double()) for a, b in zip(results, self.frame.results, strict=True)]
        errors = [(rotated.double() - x).norm() / x.norm().clamp(min=1e-300) for _, rotated, x in pairs]
        read = torch.stack([error.to(given.device) for error in errors]).tolist()
        for (what, rotated, _), error in zip(pairs, read, strict=True):
            tolerance = max(TOLERANCE, 64 * torch.finfo(rotated.dtype).eps)
            if not error <= tolerance:
                raise StructureError(
                    f"R1 would change what the {what} of the model compute, by {error:.1e} of it: the structure is not "
                    "what was found. The model is as it was. Possible: r1=False, or scaling_layers."
                )

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Within: if something fails, embeddings and head get their weights back, and are tied again."""
        norms = [part for norm in self.residual.norms for part in (norm.name, *norm.readers)]
        names = dict.fromkeys([*self.residual.writers, *self.residual.readers, *norms])
        owners = [self.model.get_submodule(name) for name in names]
        tied = [(config, config.tie_word_embeddings) for config in tying_configs(self.model)]
        backup = [(m, leaf, p, p.detach().clone()) for m in owners for leaf, p in m.named_parameters(recurse=False)]
        try:
            yield
        except BaseException:
            for module, leaf, parameter, values in backup:
                parameter.data.copy_(values)
                module._parameters[leaf] = parameter
            for config, value in tied:
                config.tie_word_embeddings = value
            raise

    def _untie(self) -> None:
        """Give readers that share their weight with a writer their own: R1 makes them differ."""
        written = {id(self.model.get_submodule(name).weight) for name in self.residual.writers}
        readers = [name for norm in self.residual.norms for name in norm.readers]
        for name in [*readers, *self.residual.readers]:
            reader: Any = self.model.get_submodule(name)
            if id(reader.weight) in written:
                reader.weight = nn.Parameter(reader.weight.detach().clone(), reader.weight.requires_grad)
                for config in tying_configs(self.model):
                    config.tie_word_embeddings = False


def _refuse_shared_tables(model: nn.Module, frame: Frame, residual: Residual) -> None:
    """Raise StructureError where what writes the stream shares its weight with a layer that R1 leaves as it is."""
    written = {id(model.get_submodule(name).weight): name for name in residual.writers}
    turned = {*residual.writers, *residual.readers, *(name for norm in residual.norms for name in norm.readers)}
    for name in frame.trace.calls:
        weight = getattr(model.get_submodule(name), "weight", None)
        if id(weight) in written and name not in turned:
            raise StructureError(
                f"R1 would rotate the weight of {written[id(weight)]}, which is that of {name}, too, outside of the "
                "residual stream that is rotated. Possible: r1=False."
            )


def _check_supported(config: RotationConfig) -> None:
    """Raise NotSupportedError for trained smoothing, ConfigError for options that exclude each other."""
    for name, value in (
        ("train_smooth", config.train_smooth),
        ("smooth_positions", config.smooth_positions),
        ("online_config.use_input_prescale", config.online_config and config.online_config.use_input_prescale),
    ):
        if value:
            raise NotSupportedError(
                f"RotationConfig({name}={value!r}): learned smoothing is not part of this version. Possible: "
                "trainable=True alone, which learns rotations."
            )
    if config.trainable and (config.online_r1_rotation or not (config.r1 or config.r2)):
        raise ConfigError(
            "RotationConfig: trainable=True learns rotations that fold into weights. Possible: r1=True or r2=True, "
            "without online_r1_rotation."
        )
    if config.online_r1_rotation and not config.r1:
        raise ConfigError("RotationConfig: online_r1_rotation=True has no effect with r1=False.")
    if not (config.r1 or config.r2 or config.r3 or config.r4):
        raise ConfigError("RotationConfig: r1, r2, r3 and r4 are all False, so there is nothing to rotate.")


def _listed_targets(model: nn.Module, config: RotationConfig, blocks: tuple[str, ...]) -> list[str] | None:
    """Full names of the layers that the config lists for online rotation; None: they are found in each block."""
    listed = config.online_config.online_rotation_layers if config.online_config else None
    if listed is None and config.r1 and config.online_r1_rotation:
        listed = given_targets(model, config, blocks)
    modules = dict(model.named_modules())
    for name in listed or []:
        if not is_linear(modules.get(name, model)):
            raise ConfigError(f"Online rotation: {name!r} is no linear layer of the model.")
    return listed


class QuaRot(Algorithm):
    """Rotation as a step of the sweep: everything is done before the first block runs."""

    config: RotationConfig
    reads_inputs = False
    needs_whole = True

    def __init__(self, config: RotationConfig) -> None:
        super().__init__(config)
        self.learns = config.trainable  # type: ignore[misc]
        self.measured_whole = not config.trainable  # type: ignore[misc]
        self.sums = not config.trainable  # type: ignore[misc]

    def blocks_path(self, model: nn.Module) -> str | None:
        return blocks_path(model, self.config)

    def learned_bytes(self, model: nn.Module, blocks: Sequence[str], data: Sequence[Any]) -> int:
        """The copy on which it is tried."""
        tried = self.measured_whole and self.keeps_better and len(data) > 0
        return sum(parameter.nbytes for parameter in model.parameters()) if tried else 0

    def prepare(self, model: nn.Module, blocks: Sequence[str], layers: Mapping[str, QuantLayer]) -> None:
        try:
            self._rotate(model)
        except StructureError as error:
            # Asked for by name alone: what the model allows is rotated, and `config` says what that was.
            config = self.config
            if not self.keeps_better or not config.r1 or config.online_r1_rotation or config.trainable:
                raise
            self.config = replace(config, r1=False, r2=True)
            try:
                self._rotate(model)
            except StructureError:
                self.config = config
                raise error from None
            logger.info("R1 is left out, and R2 rotates the values of each head: %s", error)

    def recorded(self, config: AlgoConfig) -> AlgoConfig | None:
        if self.left_out or not all(each.kept for each in self.errors):
            return None
        return replace(cast(RotationConfig, config), r1=self.config.r1, r2=self.config.r2)

    def _rotate(self, model: nn.Module) -> None:
        self.rotation = ModelRotation(model, self.config)
        self.plans = self.rotation.rotate()

    def learn(
        self,
        model: nn.Module,
        layers: Mapping[str, QuantLayer],
        data: Sequence[Any],
        weights: BlockWeights,
        work: Path | None,
    ) -> None:
        rotation, folded = self.rotation, self.rotation.folded
        parts = {FRAME: rotation.residual, **{name: plan.residual for name, plan in self.plans.items()}}
        stream = None if folded is None else (folded.size, folded.keep_mean)
        learned = learn_rotations(model, layers, parts, self.plans, stream, self.config, data)
        if learned is not None:
            plans = {name: learned.plan(name, plan) for name, plan in self.plans.items()}
            rotation.rotate_further(learned.stream(), plans)
