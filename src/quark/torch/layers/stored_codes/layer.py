"""Layers that hold codes: those of a loaded folder. From outside they look as the float layer does.

layer.weight            a StoredWeight, of the shape and dtype of the float weight, or what the loader waits for
layer.state_dict()      the codes, under the name `weight`, and the scales
layer.to(dtype)         computes in another dtype; codes and scales stay as they are stored
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from quark.errors import NotSupportedError
from quark.torch.layers.base import EXTRA_SUFFIXES, QuantLayer
from quark.torch.layers.conv2d import QuantConv2d
from quark.torch.layers.conv_transpose2d import QuantConvTranspose2d
from quark.torch.layers.embedding import QuantEmbedding, embedding_class
from quark.torch.layers.embedding_bag import QuantEmbeddingBag
from quark.torch.layers.linear import QuantLinear
from quark.torch.layers.low_rank import branch_of
from quark.torch.layers.online_rotation import BUFFER
from quark.torch.layers.stored_codes.copied import CopiedCodes, NotesOnCodes
from quark.torch.layers.stored_codes.weight import StoredWeight

ROLES = ("weight", "bias")
NOT_TRAINED = (
    "The codes of quantized layers have no gradient. Possible: requires_grad_() of single parameters such as norms, "
    "adapters (peft.LoraConfig), or quark.torch.dequantize(model), whose weights can be trained."
)


class Decoder(Protocol):
    """The quantizer of a loaded layer, which decodes a weight or bias."""

    @property
    def float_like(self) -> torch.Tensor:
        """A tensor on the meta device, of the shape and dtype that is decoded."""

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of what is stored."""

    def encode(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that are stored of new values, by suffix, with scales of their own."""

    def compute_in(self, dtype: torch.dtype) -> None:
        """Decode to another dtype from now on."""


class StoredLayer(QuantLayer):
    """Mixin before a quantized layer class: its weight, and its bias where that is quantized, are stored codes."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the layer computes in. PEFT makes adapters in it."""
        decoder = self.decoder("weight") or self.decoder("bias")
        if decoder is not None:
            return decoder.float_like.dtype
        return self.codes("weight").dtype

    def forward(self, input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Compute in the dtype of the layer, and answer in float32 where a 16-bit layer is given that.

        So the layer goes on where all that is not quantized around it was cast to float32, as for training.
        """
        compute: Any = super().forward
        # Under autocast torch casts by itself.
        if input.dtype != torch.float32 or torch.is_autocast_enabled(input.device.type):
            return compute(input, *args, **options)
        made = compute(input.to(self.compute_dtype), *args, **options)
        return made.to(input.dtype)

    weight: Any = property(lambda layer: layer.seen("weight"), doc="The weight as a float tensor.")
    bias: Any = property(lambda layer: layer.seen("bias"), doc="The bias as a float tensor, or None.")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a float tensor in the place of codes is quantized, as what is written into them."""
        present = self.codes_if_any(name) if name in ROLES and self.decoder(name) is not None else None
        if present is not None and not present.is_meta and self._is_float(name, value, present.dtype):
            self.write(name, value)
        else:
            if isinstance(value, nn.Parameter) and name in ROLES and self.decoder(name) is not None:
                value.requires_grad_(False)  # transformers takes FP8 codes for floats to be trained
            super().__setattr__(name, value)

    def _is_float(self, role: str, value: Any, stored: torch.dtype) -> bool:
        if isinstance(value, StoredWeight):
            return value.layer is not self or value.role != role
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
        return wide and value.dtype != stored

    def seen(self, role: str) -> torch.Tensor | None:
        """The weight or bias as those outside see it, or None for a bias that is not there."""
        table = self._buffers if role in self._buffers else self._parameters
        if role in table and table[role] is None:
            return None
        codes, decoder = self.codes(role), self.decoder(role)
        # While a loader waits for values, it asks what shape and dtype they will have in the file.
        return codes if decoder is None or codes.is_meta else StoredWeight(decoder.float_like, self, role)

    def codes(self, role: str) -> torch.Tensor:
        """The weight or bias as it is stored, in the tables of the module. Raises AttributeError where it has none."""
        if (stored := self.codes_if_any(role)) is None:
            raise AttributeError(
                f"{type(self).__name__} holds no codes of its {role}: what prunes or parametrizes a weight takes it "
                "out of the layer. Possible: quark.torch.dequantize(model) before."
            )
        return stored

    def codes_if_any(self, role: str) -> torch.Tensor | None:
        """The weight or bias as it is stored; None where it has none, as an expert whose codes lie in a merged tensor
        while a mixture is loaded.
        """
        tables: tuple[dict[str, Any], ...] = (self._parameters, self._buffers)
        for table in tables:
            stored: Any = table.get(role)
            if isinstance(stored, (StoredWeight, CopiedCodes)):  # what moves tensors one by one has put it there
                codes = stored.coded
                stored = table[role] = nn.Parameter(codes, False) if table is self._parameters else codes
            if stored is not None:
                return stored
        return None

    def quantized(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """x, quantized as the role's spec says; a float weight that a caller computes with is taken as it is.

        Raises NotSupportedError for codes that are to be trained: those in FP8 torch takes for floats.
        """
        decoder = self.decoder(role)
        if decoder is not None and self._is_put_in(x, decoder):
            return x
        if decoder is not None and x.requires_grad and x.dtype.itemsize == 1:
            raise NotSupportedError(NOT_TRAINED)
        return super().quantized(role, x)

    def _is_put_in(self, x: torch.Tensor, decoder: Decoder) -> bool:
        """Tell if a tensor in the place of codes is a float one, as `torch.func.functional_call` puts it there.

        A parameter may be FP8 codes whose data was cast with that of all parameters that are floats.
        """
        if not x.is_floating_point() or isinstance(x, StoredWeight):
            return False
        wide = x.dtype.itemsize > 1 and x.dtype != decoder.code_dtype
        cast = isinstance(x, nn.Parameter) and decoder.code_dtype.is_floating_point
        return wide and not cast and x.shape == decoder.float_like.shape

    def float_numel(self, role: str) -> int:
        """How many values a weight or bias stands for; 0 where there is none."""
        if (decoder := self.decoder(role)) is not None:
            return decoder.float_like.numel()
        coded = getattr(self, role, None)
        return 0 if coded is None else int(coded.numel())

    def decoded(self, role: str) -> torch.Tensor:
        """The float tensor that the codes stand for."""
        return self.quantized(role, self.codes(role))

    def quantized_weight(self) -> torch.Tensor:
        """The decoded weight."""
        return self.quantized("weight", self.codes("weight"))

    def quantized_bias(self) -> torch.Tensor | None:
        """The bias, decoded where it is stored as codes."""
        absent = self._parameters.get("bias") is None and self._buffers.get("bias") is None
        return None if absent else self.quantized("bias", self.codes("bias")).to(self.compute_dtype)

    def write(self, role: str, values: torch.Tensor) -> None:
        """Quantize new values into the place of the codes, as the spec says, under scales of their own.

        Raises:
            NotSupportedError: The weight is stored rotated, or the values are of another shape.
        """
        decoder = self.decoder(role)
        if decoder is None or tuple(values.shape) != tuple(decoder.float_like.shape) or BUFFER in self._buffers:
            why = "the weight is stored rotated" if BUFFER in self._buffers else f"the values are {tuple(values.shape)}"
            raise NotSupportedError(
                f"Nothing can be written into this quantized {role}: {why}. Possible: quark.torch.dequantize(model) "
                "before adapters are put on it, which then are merged into float weights."
            )
        with torch.no_grad():
            stored = decoder.encode(values.detach())
        quantizer: Any = decoder
        for suffix, tensor in stored.items():
            table: dict[str, Any] = self._parameters if role in self._parameters else self._buffers
            name = role
            if suffix in EXTRA_SUFFIXES:
                table, name = self._buffers, f"{role}_{suffix}"
            elif suffix:
                table, name = quantizer._buffers, suffix
            tensor = tensor.contiguous()
            table[name] = nn.Parameter(tensor, requires_grad=False) if table is self._parameters else tensor

    def requires_grad_(self, requires_grad: bool = True) -> StoredLayer:
        """Let nothing of the layer be trained. Raises NotSupportedError where it is to be."""
        if requires_grad:
            raise NotSupportedError(NOT_TRAINED)
        return super().requires_grad_(False)

    def decoder(self, role: str) -> Decoder | None:
        """The quantizer that decodes a weight or bias; None where it is stored as it is."""
        decoder = self._modules.get(f"{role}_quantizer")
        return decoder if hasattr(decoder, "float_like") else None  # type: ignore[return-value]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save codes, also where what moves tensors one by one has put a StoredWeight in their place."""
        decoders: dict[str, Any] = {role: decoder for role in ROLES if (decoder := self.decoder(role)) is not None}
        for role in decoders:
            self.codes_if_any(role)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for role, decoder in decoders.items():
            saved = destination.get(f"{prefix}{role}")
            # Tensors of another library's class cannot become ours.
            if type(saved) is torch.Tensor and not keep_vars and not saved.is_meta:
                destination[f"{prefix}{role}"] = CopiedCodes.of(saved, decoder, self.extras(role))
        if decoders and (notes := getattr(destination, "_metadata", None)) is not None:
            notes[prefix[:-1]] = NotesOnCodes(notes.get(prefix[:-1], {}))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        """Refuse floats where codes are: torch would cut their fractions off where the shape is that of the codes."""
        state_dict = {name: x.coded if isinstance(x, CopiedCodes) else x for name, x in state_dict.items()}
        for role in ROLES:
            new, decoder = state_dict.get(f"{prefix}{role}"), self.decoder(role)
            codes = None if decoder is None else self.codes_if_any(role)
            if new is not None and codes is not None and new.dtype != codes.dtype:
                errors.append(
                    f"{prefix}{role} is {new.dtype}, and the loaded layer holds codes of {codes.dtype}. "
                    "Possible: quark.torch.dequantize(model), which then takes float values."
                )
                state_dict = {name: x for name, x in state_dict.items() if name != f"{prefix}{role}"}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoredLayer:
        """Move all tensors as `fn` does. Of its casts the dtype becomes that of computing, where it can be one: codes,
        scales and zero points keep theirs, and a cast to a type of codes, to store floats in, leaves the layer alone.
        """
        if (weight := self.codes_if_any("weight")) is None:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        before = self.compute_dtype
        probe = torch.zeros(1, dtype=before, device=weight.device)
        after = fn(probe).dtype
        casts = after != before
        decoders = [decoder for decoder in map(self.decoder, ROLES) if decoder is not None]
        if casts and after.is_floating_point and after.itemsize > 1:
            for decoder in decoders:
                decoder.compute_in(after)
        floats = self._floats() if after.itemsize > 1 else set()

        def moved(x: torch.Tensor) -> torch.Tensor:
            made = fn(x)
            return made if id(x) in floats or made.dtype == x.dtype else x.to(made.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _floats(self) -> set[int]:
        """Ids of the tensors that are added or multiplied as they are: a float bias, and those of a branch."""
        branch = branch_of(self)
        own = [self._parameters.get(role) for role in ROLES if self.decoder(role) is None]
        return {id(x) for x in (*own, *(() if branch is None else branch.parameters()))}


class StoredLinear(StoredLayer, QuantLinear):
    """A loaded nn.Linear."""


class StoredConv2d(StoredLayer, QuantConv2d):
    """A loaded nn.Conv2d."""


class StoredConvTranspose2d(StoredLayer, QuantConvTranspose2d):
    """A loaded nn.ConvTranspose2d."""


class StoredEmbedding(StoredLayer, QuantEmbedding):
    """A loaded nn.Embedding."""


class StoredEmbeddingBag(StoredLayer, QuantEmbeddingBag):
    """A loaded nn.EmbeddingBag."""


_STORED: dict[type[QuantLayer], type[StoredLayer]] = {
    QuantLinear: StoredLinear,
    QuantConv2d: StoredConv2d,
    QuantConvTranspose2d: StoredConvTranspose2d,
    QuantEmbedding: StoredEmbedding,
    QuantEmbeddingBag: StoredEmbeddingBag,
}


def become_stored(layer: QuantLayer) -> None:
    """Let a layer that holds codes from now on look as a float layer."""
    if isinstance(layer, QuantEmbedding) and layer.made_of is not None:
        layer.__class__ = embedding_class(layer.made_of[0], StoredEmbedding)
        return
    layer.__class__ = _STORED.get(type(layer), type(layer))


def codes_of(layer: nn.Module, role: str) -> torch.Tensor:
    """The weight or bias of a layer as it is stored: codes of a loaded layer, else the float tensor."""
    codes: torch.Tensor = layer.codes(role) if isinstance(layer, StoredLayer) else getattr(layer, role)
    return codes
