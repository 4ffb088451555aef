"""FX graph mode, training with quantization, the older names."""

from __future__ import annotations

POWER_OF_TWO = """
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver, PerTensorPowOf2MinMaxObserver
def int8(observer):
    return QTensorConfig(dtype=Dtype.int8, qscheme=QSchemeType.per_tensor, observer_cls=observer, symmetric=True,
                         scale_type=ScaleType.float, round_method=RoundType.half_even, is_dynamic=False)
pof2, minmax = int8(PerTensorPowOf2MinMaxObserver), int8(PerTensorMinMaxObserver)
"""

SNIPPETS = {
    "graph mode, post training": POWER_OF_TWO
    + """
from quark.torch import ModelQuantizer
layer = QLayerConfig(input_tensors=minmax, output_tensors=minmax, weight=pof2, bias=pof2)
config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
graph = torch.export.export(net(), (images,)).module()
model = ModelQuantizer(config).quantize_model(graph, [images])
with torch.no_grad():
    error = (model(images) - net()(images)).norm() / net()(images).norm()
assert 0 < error < 0.25
""",
    "graph mode, training": POWER_OF_TWO
    + """
from quark.torch import ModelQuantizer
layer = QLayerConfig(input_tensors=minmax, output_tensors=minmax, weight=minmax, bias=minmax)
config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
graph = torch.export.export(net(), (images,)).module()
model = ModelQuantizer(config).quantize_model(graph, [images])
target = torch.randn(8, 4, generator=torch.Generator().manual_seed(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(10):
    loss = ((model(images) - target) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0]
""",
    "graph mode, frozen and exported": POWER_OF_TWO
    + """
import onnx
from quark.torch import ModelQuantizer, export_onnx
layer = QLayerConfig(input_tensors=minmax, output_tensors=minmax, weight=minmax, bias=minmax)
config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
graph = torch.export.export(net(), (images,)).module()
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(graph, [images]))
export_onnx(model=model, output_dir="./onnx", input_args=images)
assert "QuantizeLinear" in {node.op_type for node in onnx.load("onnx/quark_model.onnx").graph.node}
""",
    "graph mode, saved and loaded": POWER_OF_TWO
    + """
from quark.torch import ModelQuantizer, load_params, save_params
layer = QLayerConfig(input_tensors=minmax, output_tensors=minmax, weight=minmax, bias=minmax)
config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
graph = torch.export.export(net(), (images,)).module()
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(graph, [images]))
save_params(model, model_type="net", args=(images,), export_dir="./saved", quant_mode=QuantizationMode.fx_graph_mode)
loaded = load_params(pth_path="./saved/net_quantized.pth", quant_mode=QuantizationMode.fx_graph_mode)
with torch.no_grad():
    assert torch.allclose(loaded(images), model(images), atol=1e-5)
""",
    "training in place": """
from quark.torch import LLMTemplate, ModelQuantizer
model = ModelQuantizer(LLMTemplate.get("llama").get_config("int8")).quantize_model(llama(), data)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
losses = []
for _ in range(8):
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] - 0.1
""",
    "thresholds that are trained (TQT)": """
from quark.torch.quantization.config.config import QTensorConfig, TQTSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, TQTThresholdInitMeth
from quark.torch.quantization.observer.tqt_observer import TQTObserver
spec = QTensorConfig(dtype=Dtype.int8, qscheme=QSchemeType.per_tensor, observer_cls=TQTObserver, symmetric=True,
                     scale_type=ScaleType.float, round_method=RoundType.half_even, is_dynamic=False,
                     qat_spec=TQTSpec(threshold_init_meth=TQTThresholdInitMeth._3SD))
assert spec.qat_spec.threshold_init_meth == TQTThresholdInitMeth._3SD
""",
    "power-of-two scales": POWER_OF_TWO
    + """
import math
from quark.torch import ModelQuantizer
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=pof2)))
model = quantizer.freeze(quantizer.quantize_model(net()))
steps = model[0].weight.detach().flatten().unique().diff()
assert math.log2(float(steps.min())).is_integer()
""",
    "scales in 16 bits": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
model = llama().to(torch.bfloat16)
quantized = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(model)
with torch.no_grad():
    assert quantized(ids).logits.dtype == torch.bfloat16
""",
    "logging": """
from quark.common.utils.log import ScreenLogger
ScreenLogger(__name__).info("a line of a script")
""",
    "api addresses": """
from quark.torch.quantization.api import ModelQuantizer, load_params
from quark.torch.export.api import export_gguf, export_onnx, export_safetensors, import_model_from_safetensors
from quark.torch.export.api import save_params
from quark.torch.quantization.config.config import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.quantization.utils import RuntimeOptions
assert Dtype.int8 and callable(save_params)
""",
}
