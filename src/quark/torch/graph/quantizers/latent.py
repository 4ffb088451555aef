"""The contents of a cache of latent attention (MLA), in a graph, which has no cache.

    c, r = split(kv_a(x));   c = norm(c);   r = rotate(r)           the cache holds c and r
    keys, values = split(kv_b(c));   keys = join(keys, r)           attention reads these

So it is what kv_b reads, and what its keys are joined with that other layers of the module make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import fx

from quark.torch.graph.operators import is_call

LINEAR, COPY = "aten.linear.default", "aten.copy_.default"
VIEWS = ("aten.slice.Tensor", "aten.select.int", "aten.narrow.default")
"""Parts of a tensor into which others are copied."""
_REPEATED = tuple(f"aten.{name}.default" for name in ("expand", "clone", "contiguous"))
Read = tuple[fx.Node, fx.Node]
"""Who reads a tensor, and the tensor."""
Inside = Callable[[fx.Node], bool]


def latent_reads(layer: Sequence[fx.Node], reads: Iterable[Read], inside: Inside) -> list[Read]:
    """Return the tensors in a cache from which a layer makes keys and values; none where it reads the hidden states.

    Args:
        layer: The calls of the layer.
        reads: What attention reads of it.
        inside: Whether a node belongs to the attention module.
    """
    compressed = [(call, x) for call in layer if isinstance(x := call.args[0], fx.Node) and _is_made(x, inside)]
    if not compressed:
        return []
    own = _followers(layer)
    others = [part for reader, x in reads for part in _joined(reader, x, own, {*layer}, inside)]
    return list(dict.fromkeys([*compressed, *others]))


def _is_made(node: fx.Node, inside: Inside) -> bool:
    """Return True where a linear layer of the module has a part in a tensor."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        source = waiting.pop()
        if source in seen or not inside(source):
            continue
        if is_call(source, LINEAR):
            return True
        seen.add(source)
        waiting += source.all_input_nodes
    return False


def _followers(layer: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls of a layer, all that is computed of them, and what that is copied into."""
    found, waiting = set[fx.Node](), [*layer]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [*node.users, *([_whole(node)] if is_call(node, COPY) else ())]
    return found


def _whole(copy: fx.Node) -> fx.Node:
    """The tensor into a part of which another is copied."""
    node = copy.args[0]
    while is_call(node, *VIEWS):
        assert isinstance(node, fx.Node)
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _copies_into(whole: fx.Node) -> list[fx.Node]:
    """Return the nodes that copy another tensor into a part of one."""
    found, waiting = [], [whole]
    while waiting:
        for user in waiting.pop().users:
            if is_call(user, *VIEWS):
                waiting.append(user)
            elif is_call(user, COPY) and len(user.all_input_nodes) == 2 and user.args[1] is user.all_input_nodes[1]:
                found.append(user)
    return found


def _joined(reader: fx.Node, node: fx.Node, own: set[fx.Node], layer: set[fx.Node], inside: Inside) -> Iterator[Read]:
    """Yield the tensors that other layers of the module make of a tensor, before it is repeated for each head."""
    waiting, seen = [(reader, node)], set[fx.Node]()
    while waiting:
        reader, node = waiting.pop()
        if node in layer or node in seen:
            continue
        seen.add(node)
        if node in own:
            waiting += [(node, x) for x in node.all_input_nodes]
            waiting += [(copy, copy.all_input_nodes[1]) for copy in _copies_into(node)]
        elif _is_made(node, inside):
            while is_call(node, *_REPEATED):
                reader, node = node, node.all_input_nodes[0]
            yield reader, node
