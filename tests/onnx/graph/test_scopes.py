"""One language of patterns: names, globs and regular expressions, as for the layers of folders."""

from __future__ import annotations

import pytest

from quark.errors import ConfigError
from quark.onnx.graph.model_file import load
from quark.onnx.graph.scopes import nodes_of
from tests.models.onnx_zoo import Builder


def names_of(*scopes: str) -> list[str]:
    b = Builder()
    source = "x"
    for name in ("head/a", "head/b", "tail/a[0]", "tail/a0"):
        source = b.node("Relu", [source], name)
    proto = b.model({"x": ["n"]}, {source: ["n"]})
    for node in proto.graph.node:
        node.name = node.output[0]
    return sorted(node.name or "" for node in nodes_of(scopes, load(proto), "exclude"))


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        ("head/*", ["head/a", "head/b"]),
        ("*/a?", ["tail/a0"]),
        ("re:.*/a", ["head/a"]),
        ("^head/.*", ["head/a", "head/b"]),
        ("tail/a[0]", ["tail/a[0]"]),
        ("tail/a[1-9]", None),
        ("head", None),
    ],
)
def test_a_scope_is_a_name_before_it_is_a_pattern(scope: str, names: list[str] | None) -> None:
    if names is not None:
        assert names_of(scope) == names
        return
    with pytest.raises(ConfigError, match="exclude: .*(matches no layer|no node has the name)"):
        names_of(scope)
