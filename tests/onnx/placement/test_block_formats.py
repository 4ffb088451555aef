"""How many nodes block formats become is known before anything is calibrated."""

from __future__ import annotations

import onnx
import pytest

from quark.errors import NotSupportedError
from quark.onnx import ModelQuantizer
from quark.onnx.placement import block_formats
from tests.models.onnx_zoo import Reader, mlp, vectors


def _written_out(model: onnx.ModelProto) -> int:
    """Nodes that the calls of a file become."""
    sizes = {(f.domain, f.name, f.overload): len(f.node) for f in model.functions}
    return sum(sizes.get((node.domain, node.op_type, node.overload), 0) for node in model.graph.node)


@pytest.mark.parametrize("name", ["MX4", "MXFP4E2M1"])
def test_the_count_before_is_that_of_the_file(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    written = ModelQuantizer(name).quantize_model(mlp(), None, Reader(vectors(2)))
    assert written is not None
    count = _written_out(written)
    assert count > 50
    monkeypatch.setattr(block_formats, "MOST_NODES", count)
    ModelQuantizer(name).quantize_model(mlp(), None, Reader(vectors(2)))
    monkeypatch.setattr(block_formats, "MOST_NODES", count - 1)
    with pytest.raises(NotSupportedError, match=f"tensors of block formats are functions of {count} nodes in all"):
        ModelQuantizer(name).quantize_model(mlp(), None, Reader([]))
