"""A float model on the meta device whose layers are quantized as the tensors of its folder arrive.

    loader: tensor by its name in the float model  ->  its layer  ->  scale, codes; the float tensor is let go

The layers are those of the plan that the model would get in memory. A module that a pass converts (fused experts,
Conv1D) stays as the loader knows it until all of its tensors have come: what each of them becomes is quantized at once.
Layers that share a scale wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.base.json_objects import plain_json
from quark.base.libraries.transformers import may_be_missing, tied_weights
from quark.base.log import logger
from quark.base.memory_and_disk import give_back_memory
from quark.errors import FormatError, NotSupportedError
from quark.torch.calibration.calibrate import calibrate_tensor, share_scales, sharing_scales
from quark.torch.checkpoint.carried import carried_beside, plan_carried
from quark.torch.checkpoint.float_model import check_metas
from quark.torch.checkpoint.loading import hold_codes, mark_loaded, stored_on_meta
from quark.torch.checkpoint.opened import opened_from
from quark.torch.checkpoint.sources.source import Source
from quark.torch.config.config import QConfig
from quark.torch.flows.on_load.mapped_files import MappedFiles
from quark.torch.formats import FORMATS
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.layers import QuantLayer
from quark.torch.layers.fake_quant import FakeQuantize
from quark.torch.layers.replace import replace_layer, set_submodule
from quark.torch.model.folder_files import regular_file
from quark.torch.model.names import dropped_names, loaded_into
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.model.passes import UnfusedExperts, made_again, prepare, undo
from quark.torch.plan import Plan, chooser, make_plan

_RELEASED = 1 << 22
"""Bytes of tensors that arrive before the pages of their files are given back."""
ROLES = ("weight", "bias")
"""The tensors of a layer that arrive and may be quantized."""


class Arrivals:
    """The layers of a model that is being loaded.

    Args:
        model: The float model that a loader has built, on the meta device; it gets quantized layers.
        config: What to quantize, without data.
        files: The files that the loader is about to read.
        mapped: Of a time before it mapped them.

    Attributes:
        plan: How the layers are quantized.
        ties: Name of a tied tensor -> the one that transformers would tie it to, of those that stay tied.

    Raises:
        ConfigError, ShapeError: The config does not fit the model.
        FormatError: The files lack a tensor of a layer that is to be quantized, or hold one of another shape or kind.
        NotSupportedError: The files are none of safetensors, or the folder is quantized.
    """

    def __init__(self, model: Any, config: QConfig, files: Sequence[str | Path] | None, mapped: MappedFiles) -> None:
        folder, stored = float_metas(files)
        self._files, self._mapped, self._read = files or (), mapped, 0
        self._places: dict[str, tuple[str, ...]] = {}
        check_metas(folder, model, stored)
        self.model, self.config = model, config
        self._own = dict(model.state_dict(keep_vars=True))
        present = self._placed(folder, stored)
        self.plan = self._replace()
        self.ties = self._share_ties(present)
        self._check_present(folder, present)

    def _placed(self, folder: Path, stored: Iterable[str]) -> set[str]:
        """The names that the float model has for what files hold.

        Raises FormatError where its own class has none: what it leaves out by design apart.
        """
        target = loaded_into(self.model, self._own)
        found = {name: target(name) for name in stored}
        left_out = {name for name, places in found.items() if self._own.keys().isdisjoint(places)}
        unknown = sorted(left_out.difference(dropped_names(self.model, left_out))) if self._is_own_class else []
        if unknown:
            raise FormatError(
                f"{folder} holds {len(unknown)} tensors that {type(self.model).__name__} has no place for: "
                f"{', '.join(unknown[:5])}. Possible: `quark quantize --keep-unexpected`, which copies them."
            )
        return {name for places in found.values() for name in places}

    @property
    def _is_own_class(self) -> bool:
        """True for a model of the class that the config of the folder names, which has all of its tensors."""
        return type(self.model).__name__ in (getattr(self.model.config, "architectures", None) or ())

    def _replace(self) -> Plan:
        """Put quantized layers into the model, but for what a pass converts; return the plan."""
        model, config = self.model, self.config
        originals = prepare(model, chooser(config, model).wanted)
        carried = carried_beside(model, opened_from(model)) if config.layer_quant_config or config.exclude else {}
        plan = make_plan(config, model, read_elsewhere=weights_read_elsewhere(model), beside=carried)
        plan = plan_carried(config, model, plan, carried)
        if left := plan.without_form(model):
            logger.info("In float, as these classes have no quantized form: %s.", left)
        self._groups = sibling_groups(model, config.shared_scale_groups)
        self._layers = {name: replace_layer(model, name, spec) for name, spec in plan.layers.items()}
        weights = {name: spec.weight for name, spec in plan.layers.items() if spec.weight is not None}
        self._families = {name: tuple(f) for f in sharing_scales(weights, self._groups) for name in f}
        self._waiting = {
            name: {role for role in ROLES if isinstance(layer.quantizer(role), FakeQuantize)}
            for name, layer in self._layers.items()
        }
        self._converted = {name: (module, model.get_submodule(name)) for name, module in originals.items()}
        undo(model, originals)
        self._absent = {
            name: {leaf for leaf, _ in module.named_parameters(recurse=False)} for name, module in originals.items()
        }
        return plan

    def _share_ties(self, present: set[str]) -> dict[str, str]:
        """Find what else gets a tensor that several names share, where one of them is quantized.

        Each use of it is quantized for itself, so nothing stays tied there; return what does.

        Args:
            present: Names that the files have tensors for; those that get one by a tie are added.
        """
        ties = tied_weights(self.model)
        groups: dict[str, list[str]] = {}
        for name, source in ties.items():
            groups.setdefault(source, [source]).append(name)
        for source, names in groups.items():
            there = [name for name in names if name in present]
            if there and any(map(self._waits_for, names)):
                self._places |= {name: (name,) for name in there}
                self._places[there[0]] = (there[0], *(name for name in names if name not in present))
                ties = {name: other for name, other in ties.items() if other != source}
            present.update(names if there else ())
        return dict(ties)

    def _check_present(self, folder: Path, present: set[str]) -> None:
        """Raise FormatError where files lack a parameter of a layer to quantize, or of their own class any."""
        made_up = may_be_missing(self.model)
        parameters = [name for name, tensor in self._own.items() if isinstance(tensor, nn.Parameter)]
        wanted = [name for name in parameters if self._is_own_class or self._waits_for(name)]
        lacking = [name for name in wanted if name not in present]
        missing = [name for name in lacking if self._waits_for(name) or not any(re.search(p, name) for p in made_up)]
        if missing:
            raise FormatError(
                f"{folder} lacks {len(missing)} tensors of {type(self.model).__name__}, which would be random: "
                f"{', '.join(missing[:5])}. Possible: the class that its config.json names, or exclude=[LAYER] for a "
                "layer of another class."
            )

    @property
    def unfused(self) -> list[str]:
        """Names of the blocks of experts that are taken apart."""
        return [name for name, (_, made) in self._converted.items() if isinstance(made, UnfusedExperts)]

    def _waits_for(self, name: str) -> bool:
        layer, _, leaf = name.rpartition(".")
        return leaf in self._absent[layer] if layer in self._absent else self._is_quantized(name)

    def wants(self, name: str) -> bool:
        """True for a tensor of the float model that is to be given to `receive`, and not to be put into the model."""
        return name in self._places or self._waits_for(name)

    def places(self, name: str) -> tuple[str, ...]:
        """The names of all tensors of the float model that a tensor of it is: more than its own where it was tied."""
        return self._places.get(name, (name,))

    def bytes_of(self, name: str, tensor: torch.Tensor) -> int:
        """The bytes of what the quantized model will hold of a tensor of the float model."""
        layer, _, leaf = name.rpartition(".")
        if layer not in self._converted:
            return self._stored_bytes(layer, leaf, tensor)
        module = self._converted[layer][1]
        own = ((n.rpartition(".")[0], n.rpartition(".")[2], x) for n, x in module.named_parameters())
        parts = [(self._stored_bytes(_joined(layer, inner), role, x), x.nbytes) for inner, role, x in own]
        # Of its share: which of them come of which tensor only the pass knows.
        stored, whole = (sum(column) for column in zip(*parts, strict=True))
        return stored * tensor.nbytes // max(1, whole)

    def _stored_bytes(self, layer: str, role: str, x: torch.Tensor) -> int:
        if role not in self._waiting.get(layer, ()):
            return x.nbytes
        quantized = self._layers[layer]
        quantizer = quantized.quantizer(role)
        assert isinstance(quantizer, FakeQuantize)
        layout = FORMATS["quark"].make_layout(quantizer.spec, quantized.spec, x.dtype, "reorder", True)
        return sum(t.nbytes for t in stored_on_meta(layout, quantizer.spec, tuple(x.shape), x.dtype).values())

    def receive(self, name: str, tensor: torch.Tensor) -> list[nn.Module]:
        """Take a tensor of the float model, and quantize what is complete with it.

        Args:
            name: For which `wants` says yes.
            tensor: Its values, where the model is to have them; on the meta device the codes have none.

        Returns:
            The modules that have a tensor of it, or what was made of it.

        Raises:
            NonFiniteError, CalibrationError: It cannot be quantized; names it.
        """
        filled: list[nn.Module] = []
        for place in self.places(name):
            layer, _, leaf = place.rpartition(".")
            if layer in self._converted:
                filled += self._convert(layer, leaf, tensor)
            else:
                filled.append(self._fill(place, tensor))
        self._read += tensor.nbytes
        if self._read > _RELEASED:
            self._read = 0
            self._mapped.release(self._files)
            give_back_memory()
        return filled

    def _convert(self, name: str, leaf: str, tensor: torch.Tensor) -> list[nn.Module]:
        """Give what a pass makes of a tensor to the layers that it makes; put them into the model with the last one."""
        original, made = self._converted[name]
        empty = original._parameters[leaf]
        original._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        self._absent[name].discard(leaf)
        last = not self._absent[name]
        # Without values nothing tells what came of which tensor: all of it is given at the end.
        parts = {n: x.detach() for n, x in made_again(made, original).named_parameters() if not x.is_meta or last}
        original._parameters[leaf] = empty
        filled = []
        for inner, part in parts.items():
            if tensor.is_meta or not part.is_meta:
                place = _joined(name, inner)
                # What stays in float is no view, which would keep all of what it is a part of.
                part = part if self._is_quantized(place) else part.clone(memory_format=torch.contiguous_format)
                filled.append(self._fill(place, part))
        if last:
            set_submodule(self.model, name, made)
        return [*filled, made] if last else filled

    def _is_quantized(self, tensor: str) -> bool:
        name, _, leaf = tensor.rpartition(".")
        return leaf in self._waiting.get(name, ())

    def _fill(self, place: str, tensor: torch.Tensor) -> nn.Module:
        """Give a layer a tensor; quantize it, and those that share a scale with it, if they are complete."""
        name, _, leaf = place.rpartition(".")
        layer, waits = self._module(name), self._is_quantized(place)
        layer._parameters[leaf] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        if waits:
            self._waiting[name].discard(leaf)
            family = self._families.get(name, (name,))
            if not any(self._waiting[member] for member in family):
                self._quantize({member: self._layers[member] for member in family})
        return layer

    def _module(self, name: str) -> nn.Module:
        if name in self._layers:
            return self._layers[name]
        around = next((n for n in self._converted if name.startswith(f"{n}.")), None)
        return (
            self.model.get_submodule(name)
            if around is None
            else self._converted[around][1].get_submodule(name.removeprefix(f"{around}."))
        )

    def _quantize(self, layers: Mapping[str, QuantLayer]) -> None:
        for name, layer in layers.items():
            for role in ROLES:
                quantizer = layer.quantizer(role)
                tensor: torch.Tensor | None = getattr(layer, role, None)
                if isinstance(quantizer, FakeQuantize) and tensor is not None and not tensor.is_meta:
                    calibrate_tensor(f"{name}.{role}", tensor.detach(), quantizer)
        if len(layers) > 1 and not any(layer.weight.is_meta for layer in layers.values()):
            share_scales(layers, self._groups)
        for layer in layers.values():
            hold_codes(layer)

    def finish(self) -> None:
        """Note on the model what it was quantized as. Raises FormatError where tensors have not arrived."""
        left = [f"{name}.{leaf}" for table in (self._absent, self._waiting) for name in table for leaf in table[name]]
        if left:
            raise FormatError(f"{len(left)} tensors of layers that are to be quantized were not loaded: {left[0]}.")
        self.model.quant_plan = self.plan
        mark_loaded(self.model, self.config, "quark")
        # A loader keeps its quantizer with the model: it has nothing more to ask for, and keeps nothing else.
        self._places, self._own, self._layers, self._converted, self._absent, self._waiting = {}, {}, {}, {}, {}, {}


def float_metas(files: Iterable[str | Path] | None) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder of files, and the dtypes and shapes of its tensors, on the meta device.

    Raises:
        FormatError: A file is damaged.
        NotSupportedError: The files are none of safetensors, or the folder is quantized.
    """
    paths = [Path(file) for file in files or ()]
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        came = paths[0].name if paths else "a state dict"
        raise NotSupportedError(
            f"Quantizing while loading reads safetensors files, not {came}. Possible: a folder that save_pretrained "
            "wrote, or quark.quantize(model, ...) of the loaded model."
        )
    folder = paths[0].parent
    if (folder / "config.json").is_file():
        stored = plain_json(regular_file(folder / "config.json").read_text(encoding="utf-8"))
        quantization = stored.get("quantization_config") if isinstance(stored, dict) else None
        if quantization:
            method = repr(quantization.get("quant_method") if isinstance(quantization, dict) else quantization)[:60]
            raise NotSupportedError(
                f"{folder} is quantized already (quant_method {method}), and a float folder is "
                "needed. Possible: from_pretrained without quantization_config."
            )
    return folder, Source(paths).metas()


def _layer_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)
