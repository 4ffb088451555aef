"""Basic usage, configuration, observers, calibration data, layers, save and load."""

from __future__ import annotations

SNIPPETS = {
    "basic usage, weights in int8": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
quant_config = QConfig(global_quant_config=QLayerConfig(weight=spec))
model = ModelQuantizer(quant_config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.05
""",
    "basic usage, encoded text": """
from torch.utils.data import DataLoader
from quark.torch import LLMTemplate, ModelQuantizer
text = tokenizer("Hello, how are you?", return_tensors="pt")
loader = DataLoader(text["input_ids"])
quant_config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8")
quantizer = ModelQuantizer(quant_config)
model = quantizer.freeze(quantizer.quantize_model(llama(), loader))
assert 0 < distance(model, llama()) < 0.2
""",
    "a tensor described in full": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerGroupMinMaxObserver
spec = QTensorConfig(dtype=Dtype.uint4, observer_cls=PerGroupMinMaxObserver, symmetric=False,
                     scale_type=ScaleType.float, round_method=RoundType.half_even, qscheme=QSchemeType.per_group,
                     ch_axis=1, is_dynamic=False, group_size=128)
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"]))
model = quantizer.freeze(quantizer.quantize_model(llama()))
row = model.model.layers[0].mlp.up_proj.weight[0]
assert len(row.unique()) <= 16
""",
    "fp8 and bfloat16 tensors": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver, PlaceholderObserver
bf16 = QTensorConfig(dtype=Dtype.bfloat16, observer_cls=PlaceholderObserver)
fp8 = QTensorConfig(dtype=Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, observer_cls=PerTensorMinMaxObserver,
                    is_dynamic=False)
layer = QLayerConfig(input_tensors=fp8, weight=fp8)
quant_config = QConfig(global_quant_config=layer, layer_quant_config={"lm_head": QLayerConfig(weight=bf16)})
model = ModelQuantizer(quant_config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.2
""",
    "input, weight, bias and output": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
layer = QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec, bias=spec)
model = ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(net(), [images])
with torch.no_grad():
    error = (model(images) - net()(images)).norm() / net()(images).norm()
assert 0 < error < 0.1
""",
    "per channel and dynamic per tensor": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerChannelSpec, Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
weight = Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0,
                            is_dynamic=False).to_quantization_spec()
dynamic = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                            is_dynamic=True).to_quantization_spec()
model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=dynamic))).quantize_model(
    llama())
assert 0 < distance(model, llama()) < 0.05
""",
    "exclusions by pattern": """
from dataclasses import replace
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int4PerGroupSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int4PerGroupSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                        group_size=32).to_quantization_spec()
quant_config = QConfig(global_quant_config=QLayerConfig(weight=spec))
quant_config = replace(quant_config, exclude=["lm_head", "*.down_proj"])
quantizer = ModelQuantizer(quant_config)
model = quantizer.freeze(quantizer.quantize_model(llama()))
reference = llama()
assert torch.equal(model.lm_head.weight, reference.lm_head.weight)
assert torch.equal(model.model.layers[1].mlp.down_proj.weight, reference.model.layers[1].mlp.down_proj.weight)
assert not torch.equal(model.model.layers[1].mlp.up_proj.weight, reference.model.layers[1].mlp.up_proj.weight)
""",
    "layers by name and by type": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int4PerChannelSpec, Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
int8 = QLayerConfig(weight=Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float",
                                             round_method="half_even", is_dynamic=False).to_quantization_spec())
int4 = QLayerConfig(weight=Int4PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0,
                                              is_dynamic=False).to_quantization_spec())
quantizer = ModelQuantizer(QConfig(global_quant_config=int8, layer_type_quant_config={nn.Conv2d: int4},
                                   layer_quant_config={"3": int8}))
model = quantizer.freeze(quantizer.quantize_model(net()))
assert len(model[0].weight[0].unique()) <= 16 < len(model[3].weight[0].unique())
""",
    "embeddings that a type names": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
int8 = QLayerConfig(weight=Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float",
                                             round_method="half_even", is_dynamic=False).to_quantization_spec())
quantizer = ModelQuantizer(QConfig(global_quant_config=int8, layer_type_quant_config={nn.Embedding: int8}))
model = quantizer.freeze(quantizer.quantize_model(llama()))
assert len(model.model.embed_tokens.weight.unique()) <= 256
""",
    "observers": """
from quark.torch.quantization.config.config import QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerChannelMinMaxObserver, PerTensorMinMaxObserver
x = torch.tensor([[-1.0, 0.5], [2.0, 0.25]])
for observer, scheme, axis, scale in (
    (PerTensorMinMaxObserver, QSchemeType.per_tensor, None, [2 / 127.5]),
    (PerChannelMinMaxObserver, QSchemeType.per_channel, 0, [1 / 127.5, 2 / 127.5]),
):
    spec = QTensorConfig(dtype=Dtype.int8, observer_cls=observer, symmetric=True, scale_type=ScaleType.float,
                         round_method=RoundType.half_even, qscheme=scheme, ch_axis=axis, is_dynamic=False)
    watching = observer(spec)
    watching(x)
    found, zero_point = watching._calculate_qparams()
    # Half of the 255 steps from -128 to 127.
    assert torch.allclose(found.flatten().float(), torch.tensor(scale), rtol=1e-4)
""",
    "calibration methods": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
for method in ("min_max", "histogrampro", "MSE", "percentile"):
    spec = Int8PerTensorSpec(observer_method=method, symmetric=True, scale_type="float", round_method="half_even",
                             is_dynamic=False).to_quantization_spec()
    weight = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float",
                               round_method="half_even", is_dynamic=False).to_quantization_spec()
    layer = QLayerConfig(input_tensors=spec, weight=weight)
    model = ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(llama(), data)
    assert 0 < distance(model, llama()) < 0.2, method
""",
    "calibration data as tensors": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config("int8")
model = ModelQuantizer(config).quantize_model(llama(), [ids[:2], ids[2:]])
assert 0 < distance(model, llama()) < 0.1
""",
    "calibration data as dictionaries": """
from torch.utils.data import DataLoader
from quark.torch import LLMTemplate, ModelQuantizer
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
config = LLMTemplate.get("llama").get_config("int8")
model = ModelQuantizer(config).quantize_model(llama(), DataLoader(rows, batch_size=2))
other = ModelQuantizer(LLMTemplate.get("llama").get_config("int8")).quantize_model(llama(), data)
assert distance(model, other) < 1e-6
""",
    "save and load parameters": """
from quark.torch import ModelQuantizer, load_params, save_params
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec)))
model = quantizer.freeze(quantizer.quantize_model(net(), [images]))
save_params(model, model_type="net", export_dir="./save_dir")
loaded = load_params(net(), json_path="./save_dir/net.json", safetensors_path="./save_dir/net.safetensors")
with torch.no_grad():
    assert torch.allclose(loaded(images), model(images), atol=1e-5)
""",
    "a configuration as a dictionary": """
import json
from quark.torch import LLMTemplate
from quark.torch.quantization.config.config import QConfig
config = LLMTemplate.get("llama").get_config("uint4_wo_32")
again = QConfig.from_dict(json.loads(json.dumps(config.to_dict())))
assert again.global_quant_config.weight == config.global_quant_config.weight
""",
    "int2 and int3 weights": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int2PerGroupSpec, Int3PerGroupSpec, QConfig, QLayerConfig
counts = []
for made in (Int2PerGroupSpec, Int3PerGroupSpec):
    spec = made(ch_axis=-1, group_size=32).to_quantization_spec()
    quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec)))
    model = quantizer.freeze(quantizer.quantize_model(llama()))
    counts.append(len(model.model.layers[0].mlp.up_proj.weight[0, :32].unique()))
assert counts[0] <= 4 < counts[1] <= 8
""",
    "two stages": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec, Int4PerChannelSpec, ProgressiveSpec, QConfig, QLayerConfig)
spec = ProgressiveSpec(
    first_stage=FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=False),
    second_stage=Int4PerChannelSpec(symmetric=True, scale_type="float32", round_method="half_even", ch_axis=0,
                                    is_dynamic=False)).to_quantization_spec()
assert len(spec) == 2
model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"])).quantize_model(
    llama())
assert 0 < distance(model, llama()) < 0.5
""",
    "scales that are quantized": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    FP4PerGroupSpec, FP8E4M3PerTensorSpec, QConfig, QLayerConfig, ScaleQuantSpec)
spec = ScaleQuantSpec(first_stage=FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False),
                      second_stage=FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False))
layer = QLayerConfig(weight=spec.to_quantization_spec())
model = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"])).quantize_model(llama())
assert 0 < distance(model, llama()) < 0.5
""",
}

for _name in ("OCP_MXFP8E4M3", "OCP_MXFP8E5M2", "OCP_MXFP6E3M2", "OCP_MXFP6E2M3", "OCP_MXFP4", "OCP_MXINT8"):
    SNIPPETS[f"microscaling, {_name}"] = f"""
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import {_name}Spec, QConfig, QLayerConfig
spec = {_name}Spec(is_dynamic=False, ch_axis=-1).to_quantization_spec()
model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.25
"""
for _name, _arguments in (("MX6", "ch_axis=-1, block_size=32"), ("MX9", "ch_axis=-1, block_size=16"),
                          ("BFP16", "ch_axis=-1")):  # fmt: skip
    SNIPPETS[f"block formats, {_name}"] = f"""
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import {_name}Spec, QConfig, QLayerConfig
spec = {_name}Spec({_arguments}).to_quantization_spec()
layer = QLayerConfig(weight=spec, input_tensors=spec)
model = ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.25
"""
