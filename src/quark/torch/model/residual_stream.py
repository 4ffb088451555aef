"""The residual stream of a model: who writes to it, which norms read it, and which layers read those norms.

    stream = embeddings + sum of writers        writers: o_proj, down_proj and what else is added
    norm(x) = gain * (x - m) / rms(x - m) + b   m: the mean (LayerNorm) or 0 (RMSNorm); gain: weight or 1 + weight

It is read off a recorded forward (`quark.torch.model.dataflow`), for one part of the model at a time: a decoder block,
or the frame, which is the model with its blocks passing their input through. A norm is known by what it computes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from quark.errors import StructureError
from quark.torch.model.blocks.forwards import with_plain_forward
from quark.torch.model.dataflow import AdditionChain, Node, Trace
from quark.torch.model.record_forward import is_linear

_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
"""The functions whose tensor a sum may start from."""


@dataclass(frozen=True)
class StreamNorm:
    """A norm on the stream.

    Attributes:
        name: Full name within its part.
        readers: Names of the layers with a weight (out, width) that read its result.
        offset: 1 where the gain is 1 + weight (Gemma), else 0.
        centred: Whether it subtracts the mean.
    """

    name: str
    readers: tuple[str, ...]
    offset: float
    centred: bool


@dataclass(frozen=True)
class Residual:
    """The stream within one part of a model.

    Attributes:
        writers: Names of linear layers and embeddings whose results are added to it.
        norms: The norms that read it.
        readers: Names of linear layers that read it without a norm.
    """

    writers: tuple[str, ...] = ()
    norms: tuple[StreamNorm, ...] = ()
    readers: tuple[str, ...] = ()

    @property
    def centred(self) -> bool:
        """True where a norm subtracts the mean."""
        return any(norm.centred for norm in self.norms)


def find_residual(part: nn.Module, trace: Trace, start: int, end: int | None = None) -> Residual:
    """The stream that holds the value `start` of a recorded forward of `part`.

    Args:
        part: The module that was recorded.
        trace: Its forward.
        start: The value with which the stream enters or leaves the embeddings.
        end: The value with which it leaves the part; None: it must end within it, in norms or linear layers.

    Raises:
        StructureError: Something else reads or writes the stream; names it.
    """
    stream = trace.addition_chain(start)
    if end is not None and end not in stream.values:
        raise StructureError(
            "The result of the block is not its input plus something: there is no residual stream through it "
            "(norms that stand on the stream, as in BERT, have none)."
        )
    _refuse_constants(trace, stream, start)
    writers = tuple(_writer(part, node) for node in stream.writers if node.kind not in _ZEROS)
    norms, readers = [], []
    for node in stream.readers:
        module = part.get_submodule(node.module) if node.module else None
        if node.module and _reads_linearly(module, trace.values[start].shape[-1]):
            readers.append(node.module)
        else:
            norms.append(_norm(part, trace, node))
    if end is None:
        _refuse_results(trace, stream, norms)
    return Residual(tuple(dict.fromkeys(writers)), tuple(dict.fromkeys(norms)), tuple(dict.fromkeys(readers)))


def hidden_values(trace: Trace, name: str, shape: torch.Size) -> tuple[int, int]:
    """The values of the hidden state that the module `name` was called with and that it returned."""
    inputs, outputs = trace.spans[name]
    hidden = [next((v for v in side if trace.values[v].shape == shape), None) for side in (inputs, outputs)]
    if hidden[0] is None or hidden[1] is None:
        raise StructureError(f"No hidden state of shape {tuple(shape)} enters and leaves {name or 'the block'}.")
    return hidden[0], hidden[1]


def _reads_linearly(module: nn.Module | None, width: int) -> bool:
    """Return True where a module applies one weight (out, width) to its input: a linear layer, or a router."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or isinstance(module, nn.Embedding):
        return False
    return weight.ndim == 2 and weight.shape[-1] == width


def _writer(part: nn.Module, node: Node) -> str:
    module = part.get_submodule(node.module) if node.module else None
    if node.module is None or not (is_linear(module) or isinstance(module, nn.Embedding)):  # type: ignore[arg-type]
        raise StructureError(
            f"{_node_text(node)} writes to the residual stream; only linear layers and embeddings can be rotated "
            "(a norm there, as in BERT and Gemma 2, multiplies single channels of the stream)."
        )
    return node.module


def _norm(part: nn.Module, trace: Trace, node: Node) -> StreamNorm:
    module = part.get_submodule(node.module) if node.module else None
    measured = measure_norm(module) if module is not None else None
    if node.module is None or measured is None:
        raise StructureError(
            f"{_node_text(node)} reads the residual stream; only norms and linear layers are understood."
        )
    (normed,) = node.outputs
    chain = trace.addition_chain(normed)
    if len(chain.writers) > 1:
        raise StructureError(
            f"{_node_text(chain.writers[-1])} is added to the result of {node.module}; nothing may be."
        )
    _refuse_constants(trace, chain, normed)
    readers = []
    for reader in chain.readers:
        inner = part.get_submodule(reader.module) if reader.module else None
        if reader.module is None or not _reads_linearly(inner, trace.values[normed].shape[-1]):
            raise StructureError(f"{_node_text(reader)} reads the result of {node.module}; only linear layers may.")
        readers.append(reader.module)
    return StreamNorm(node.module, tuple(dict.fromkeys(readers)), *measured)


def _refuse_constants(trace: Trace, stream: AdditionChain, start: int) -> None:
    for value in stream.values - {start}:
        if trace.values[value].node is None:
            what = trace.values[value].parameter
            raise StructureError(
                f"{f'The parameter {what}' if what else 'A tensor that no layer made'} is added to the residual "
                "stream; only linear layers and embeddings can be rotated."
            )


def _refuse_results(trace: Trace, stream: AdditionChain, norms: list[StreamNorm]) -> None:
    """Raise where the part returns the stream or a normalised copy of it: the caller would get rotated values."""
    names = {norm.name for norm in norms}
    for value in trace.spans[""][1]:
        origin = trace.producer(trace.origin(value))
        if value in stream.values or (origin is not None and origin.module in names):
            raise StructureError(
                "The model returns its residual stream (it has no output head): R1 would rotate what it returns."
            )


def _node_text(node: Node) -> str:
    return f"{node.module} ({node.kind})" if node.module else f"The operation {node.kind!r} in {node.scope or 'it'}"


def measure_norm(module: nn.Module) -> tuple[float, bool] | None:
    """(offset of the gain, whether the mean is subtracted), or None for what is no norm over the last axis."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if list(module.children()) or not isinstance(weight, torch.Tensor) or weight.ndim != 1:
        return None
    norm = with_plain_forward(copy.deepcopy(module)).to("cpu", torch.float64).eval()
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100 + 30
    try:
        with torch.no_grad():
            y = norm(x)
    except (TypeError, RuntimeError, ValueError):
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    gain = cast(torch.Tensor, norm.weight).detach()
    shift = 0 if bias is None else cast(torch.Tensor, norm.bias).detach()
    for centred in (False, True):
        z = x - x.mean(-1, keepdim=True) if centred else x
        z = z / z.pow(2).mean(-1, keepdim=True).sqrt()
        for offset in (0.0, 1.0):
            expected = z * (gain + offset) + shift
            if (y - expected).norm() <= 1e-5 * expected.norm():
                return offset, centred
    return None
