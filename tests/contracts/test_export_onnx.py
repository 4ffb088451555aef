"""Every scheme as ONNX: the file holds integers, and stock ONNX Runtime computes what the torch model computes.

A model has a Linear of each scheme of one element type, all on the same input, so that one export serves several tests,
nothing that is rounded before a quantizer blurs the comparison, and a test that fails names the type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn

from quark.core.dtypes import Dtype
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.onnx_ops.element_types import code_type
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.config.config import QConfig
from quark.torch.config.lowering import config_of_layer
from tests.models.onnx_sessions import exact_session, session

INPUTS, OUTPUTS = 128, 40


def element(scheme: str) -> Dtype:
    """The element type of the codes of a scheme's weights."""
    weight = SCHEMES[scheme].weight
    assert weight is not None
    return (weight.code_spec or weight).dtype


ELEMENTS = sorted({element(scheme).name for scheme in SCHEMES})


class Branches(nn.Module):
    """A Linear for each scheme; all read the input (..., 128)."""

    def __init__(self, schemes: Iterable[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({f"as_{name}": nn.Linear(INPUTS, OUTPUTS) for name in schemes})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers.values())


class Export:
    """A Linear of each of the schemes, quantized and exported."""

    def __init__(self, schemes: list[str], folder: Path) -> None:
        random = torch.Generator().manual_seed(1)
        data = [torch.randn(2, 9, INPUTS, generator=random) for _ in range(2)]
        self.schemes, self.folder = schemes, folder
        self.x = torch.randn(2, 9, INPUTS, generator=random) * 3
        by_name = {f"layers.as_{name}": config_of_layer(SCHEMES[name]) for name in schemes}
        self.quantizer = ModelQuantizer(QConfig(config_of_layer(LayerSpec()), layer_quant_config=by_name))
        self.model = self.quantizer.quantize_model(Branches(schemes).eval(), data)
        with torch.no_grad():
            self.wanted = dict(zip(schemes, self.model(self.x), strict=True))
            layers = {name: self.model.layers[f"as_{name}"] for name in schemes}
            self.weights = {name: layer.quantized_weight() for name, layer in layers.items()}
        self.file = export_onnx(self.model, folder / "quantized", self.x, uint4_int4_flag=True, output_names=schemes)
        self.proto = onnx.load(self.file)
        self.stored = {tensor.name: tensor for tensor in self.proto.graph.initializer}

    def found(self, make: Any = exact_session) -> dict[str, np.ndarray]:
        return dict(zip(self.schemes, make(self.file).run(self.schemes, {"x": self.x.numpy()}), strict=True))


@pytest.fixture(scope="module", params=ELEMENTS)
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    schemes = [scheme for scheme in sorted(SCHEMES) if element(scheme).name == request.param]
    return Export(schemes, tmp_path_factory.mktemp("export"))


@pytest.mark.slow
def test_outputs_are_those_of_the_torch_model(export: Export) -> None:
    for scheme, values in export.found().items():
        wanted = export.wanted[scheme].numpy()
        assert np.abs(values - wanted).max() < 2e-6 * np.abs(wanted).max(), scheme


@pytest.mark.slow
def test_a_session_of_its_own_choice_stays_near(export: Export) -> None:
    """With its defaults, ONNX Runtime rounds the float operand of 4- and 8-bit products to 8 bits.

    Rounding to a step s adds an error of deviation s / sqrt(12) to each of the values x, and of that times |w| to the
    product with w. The step of a block is not above that of its row, max|x| / 127. Six deviations hold them all.
    """
    steps = export.x.abs().amax(-1, keepdim=True) / 127
    for scheme, values in export.found(session).items():
        deviation = steps / 12**0.5 * export.weights[scheme].norm(dim=1)
        assert np.all(np.abs(values - export.wanted[scheme].numpy()) <= (6 * deviation).numpy()), scheme


@pytest.mark.slow
def test_frozen_and_not_frozen_models_give_the_same_file(export: Export) -> None:
    frozen = export.quantizer.freeze(copy.deepcopy(export.model))
    file = export_onnx(frozen, export.folder / "frozen", export.x, uint4_int4_flag=True, output_names=export.schemes)
    assert export.file.read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_weights_are_stored_as_codes(export: Export) -> None:
    for scheme in export.schemes:
        dtype = element(scheme)
        codes = export.stored[f"layers.as_{scheme}.weight_quantized"]
        assert TensorProto.DataType.Name(codes.data_type) == code_type(dtype), scheme
        assert np.prod(codes.dims) == INPUTS * OUTPUTS, scheme
    large = [t for t in export.stored.values() if np.prod(t.dims) >= INPUTS * OUTPUTS]
    assert not [t.name for t in large if t.data_type == TensorProto.FLOAT]


@pytest.mark.slow
def test_the_file_says_little_about_the_machine_and_nothing_twice(tmp_path: Path) -> None:
    proto = Export(sorted(SCHEMES), tmp_path).proto
    assert {(o.domain, o.version) for o in proto.opset_import} == {("", 21), ("com.amd.quark", 1)}
    used = {(node.op_type, node.overload) for node in proto.graph.node if node.domain}
    assert used == {(f.name, f.overload) for f in proto.functions}
    assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
    # int4_wo_32 and its like read x as it is; the two int4_wa_64, nvfp4 and fp4_block16_scale_e4m3 are the same.
    assert sum(node.op_type == "QuantizeLinear" for node in proto.graph.node) == 2
