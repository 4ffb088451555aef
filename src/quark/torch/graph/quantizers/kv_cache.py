"""Where a graph quantizes keys and values: at what attention reads, which is what a cache would hold.

A graph has no cache. Keys after their norm and rotary embedding, and values, are the second and third argument of
`scaled_dot_product_attention`; in attention that is written out, the second ones of the products before and after its
softmax. With latent attention (MLA) it is what these are made of, see `latent`. Repeated for groups of queries they are
the same values, so that one scale serves both; a scale for each head acts before they are repeated, on the heads that a
cache stores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import cast

from torch import fx

from quark.core.granularity import HEADS
from quark.core.names.patterns import first_match, require_matches
from quark.core.spec import TensorSpec
from quark.errors import NotSupportedError
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import lower_tensor
from quark.torch.graph.operators import SOFTMAX, is_call
from quark.torch.graph.plan import QuantizableOperator
from quark.torch.graph.quantizers.latent import latent_reads
from quark.torch.layers.attention.cache_rules import named_layers
from quark.torch.layers.attention.heads import holds
from quark.torch.layers.fake_quant import FakeQuantize

ATTENTION = "aten.scaled_dot_product_attention.default"
PRODUCTS = ("aten.matmul.default", "aten.bmm.default")
TRANSPOSE, UNSQUEEZE = "aten.transpose.int", "aten.unsqueeze.default"
_REPEATING = (*(f"aten.{name}.default" for name in ("reshape", "view", "clone", "contiguous", "expand")), UNSQUEEZE)
"""How keys and values are repeated for groups of queries."""
Read = tuple[str, fx.Node, fx.Node]
"""A tensor that attention reads: "k" or "v", the reader, and the tensor."""


def insert_caches(
    model: fx.GraphModule, operators: Mapping[str, QuantizableOperator], config: QConfig
) -> dict[str, FakeQuantize]:
    """Quantize the keys and values that the config names, as a cache holds them.

    Args:
        model: Changed in place.
        operators: What of it can be quantized, by name.
        config: Its `kv_cache_quant_config` names the layers that make keys and values.

    Returns:
        Path of a quantizer, which is that of the output of its layer -> the quantizer.

    Raises:
        ConfigError: A pattern stands for no linear layer of the graph.
        NotSupportedError: No attention reads what a layer makes, or not as heads that have a scale each.
    """
    linear = [name for name, operator in operators.items() if operator.kind.name == "linear"]
    require_matches(config.kv_cache_quant_config, linear, "kv_cache_quant_config", strict=True)
    made: dict[str, FakeQuantize] = {}
    for name in named_layers(config, linear):
        cache = first_match(name, config.kv_cache_quant_config)
        spec = lower_tensor(cache.output_tensors) if cache else None
        assert spec is not None  # as check_cache_config asks
        reads = _reads_of(model.graph, operators[name], linear, spec)
        path = f"{name}.output_quantizer"
        made[path] = FakeQuantize(spec)
        model.add_submodule(path, made[path])
        for _, reader, tensor in reads:
            if spec.granularity == HEADS:
                reader, tensor = _before_repeating(name, reader, tensor)
            if tensor in reader.all_input_nodes:  # keys that are the values, too, are quantized already
                with model.graph.inserting_before(reader):
                    called = model.graph.call_module(path, (tensor,))
                called.meta = {key: tensor.meta[key] for key in ("val", "nn_module_stack") if key in tensor.meta}
                reader.replace_input_with(tensor, called)
    return made


def _reads_of(graph: fx.Graph, operator: QuantizableOperator, linear: Collection[str], spec: TensorSpec) -> list[Read]:
    """Return the tensors of a layer that attention reads; of the only layer, which makes keys, the values too.

    Raises NotSupportedError where it reads nothing, or what is compressed in a scale of each head.
    """
    name = operator.name
    owner, parts = name.rpartition(".")[0], holds(name)
    alone = parts == "k" and not any(holds(other) == "v" for other in linear if other.rpartition(".")[0] == owner)
    reads = [read for read in _reads(graph, owner) if read[0] in ("kv" if alone else parts)]
    inside = partial(_is_inside, owner)
    compressed = latent_reads(operator.nodes, [(reader, x) for _, reader, x in reads], inside)
    if compressed and spec.granularity == HEADS:
        raise NotSupportedError(
            f"{name} reads what another layer of {owner} makes (latent attention), whose cache has a single head. "
            "Possible: one scale for it."
        )
    reads = [("kv", *read) for read in compressed] or reads
    if not reads:
        raise NotSupportedError(
            f"{name} makes keys or values that no attention in {owner or 'the graph'} reads "
            f"({ATTENTION}, or products around a softmax). Possible: leave kv_cache_quant_config, or eager_mode."
        )
    return reads


def _reads(graph: fx.Graph, owner: str) -> Iterator[Read]:
    """Yield the tensors that the attention of a module reads."""
    for node in graph.nodes:
        if _module(node) != owner:
            continue
        if is_call(node, ATTENTION):
            yield "k", node, cast(fx.Node, node.args[1])
            yield "v", node, cast(fx.Node, node.args[2])
        elif is_call(node, *SOFTMAX):
            for part, product in (("k", _product_before(node)), ("v", _product_after(node))):
                if product is not None:
                    yield part, product, cast(fx.Node, product.args[1])


def _before_repeating(name: str, reader: fx.Node, tensor: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Who reads the keys or values of a layer as a cache stores them, (batch, heads, tokens, size), and these.

    Raises NotSupportedError where that is no tensor of the graph.
    """
    if is_call(tensor, TRANSPOSE) and {axis % tensor.meta["val"].ndim for axis in tensor.args[1:]} == {2, 3}:
        reader, tensor = tensor, cast(fx.Node, tensor.args[0])
    chain = [tensor]  # (batch, heads, tokens, size) -> (batch, heads, 1, ...) -> (batch, heads, n, ...) -> joined
    while is_call(chain[-1], *_REPEATING):
        chain.append(cast(fx.Node, chain[-1].args[0]))
    if any(is_call(node, UNSQUEEZE) and node.args[1] == 2 for node in chain[-2:-1]):
        reader, tensor = chain[-2:]
    if tensor.meta["val"].ndim != 4:
        raise NotSupportedError(
            f"{name}: attention reads {tuple(tensor.meta['val'].shape)}, and no (batch, heads, tokens, size): heads "
            "have no scale each. Possible: one scale for all of them."
        )
    return reader, tensor


def _product_before(softmax: fx.Node) -> fx.Node | None:
    """The product whose scores a softmax reads, through scaling, soft caps and masks."""
    node = softmax.args[0]
    while isinstance(node, fx.Node) and not is_call(node, *PRODUCTS):
        node = node.args[0] if node.args else None
    return node if isinstance(node, fx.Node) else None


def _product_after(softmax: fx.Node) -> fx.Node | None:
    """The product that mixes values by the probabilities."""
    seen, waiting = set[fx.Node](), [softmax]
    while waiting:
        node = waiting.pop(0)
        for user in node.users:
            if is_call(user, *PRODUCTS) and user.args[0] is node:
                return user
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return None


def _is_inside(owner: str, node: fx.Node) -> bool:
    return f"{_module(node)}.".startswith(f"{owner}.")


def _module(node: fx.Node) -> str:
    """The path of the module that an operator is called in, "" for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""
