"""What current pages, other toolkits and public scripts do with the names of AMD Quark, restated and run.

Each snippet runs in a folder of its own, with the names that its fixture gives, and raises where a name, an argument or
a default is missing. `test_torch_pages.py` has those of the PyTorch guides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.guides.torch_pages import workplace
from tests.models.onnx_zoo import Reader, cnn, images

pytestmark = pytest.mark.slow

ONNX = {
    "options of a preset, changed one by one": """
config = QConfig.get_default_config("VINT8")
config.global_quant_config.extra_options["Int32Bias"] = False
config.global_quant_config.extra_options["DedicatedQDQPair"] = True
config.global_quant_config.extra_options["QuantizeAllOpTypes"] = True
config.global_quant_config.include_cle = False
""",
    "fine-tuning of a preset, changed in place": """
config = QConfig.get_default_config("A8W8_ADAROUND")
config.global_quant_config.extra_options["FastFinetune"].update(EarlyStop=False, NumIterations=5)
""",
    "a config as a dict and back, with a layer mix of XInt8 and Int16": """
wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
first = QConfig(
    global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()), specific_layer_config={wide: [conv]},
    layer_type_config={None: ["Gemm"]}, algo_config=[CLEConfig(cle_steps=2)],
    extra_options={"SimplifyModel": False, "Int32Bias": False})
data = first.to_dict()
assert data["global_config"]["weight"]["scale_type"] == "ScaleType.PowerOf2"
assert data["specific_layer_config"][0][1] == [conv] and data["layer_type_config"] == [[None, ["Gemm"]]]
assert data["algo_config"] == [{"name": "cle", "cle_steps": 2}]
config = QConfig.from_dict(data)
assert config.to_dict() == data
""",
    "a type of layers in 16 bits, biases and outputs too": """
wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec(), bias=Int16Spec(), output_tensors=Int16Spec())
config = QConfig(global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
                 layer_type_config={wide: ["Gemm"]})
""",
    "one tensor in 16 bits": """
pooled = next(node.output[0] for node in onnx.load("float.onnx").graph.node if node.op_type == "MaxPool")
config = QConfig(global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
                 extra_options={"TensorQuantOverrides": {pooled: [{"quant_type": QuantType.QInt16}]}})
""",
    "extra options as keywords": """
config = QConfig(global_config=QLayerConfig(activation=BFloat16Spec(), weight=BFloat16Spec()), WeightScaled=True,
                 ActivationScaled=True, BF16QDQToCast=True)
""",
    "little memory and no files": """
activations = Int8Spec(calibration_method=CalibMethod.LayerwisePercentile)
config = QConfig(
    global_config=QLayerConfig(input_tensors=activations, weight=Int8Spec()),
    extra_options={"CalibOptimizeMem": True, "CalibOptimizeDisk": True, "CalibWorkerNum": 1, "TmpDir": ".",
                   "CalibPassthroughOpTypes": ["Reshape", "Transpose", "MaxPool", "Split", "Slice", "Gather"]})
""",
    "an output that is not quantized": """
config = QConfig(
    global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
    extra_options={"NodesToExcludeOutputQuantization": [conv], "ForceQuantizeNoInputCheck": True})
""",
    "a subgraph by its ends, and a pattern": """
nodes = [node.name for node in onnx.load("float.onnx").graph.node]
config = QConfig(global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
                 exclude=[([nodes[0]], [nodes[2]]), "^" + nodes[-1][:2] + ".*"])
""",
    "automatic mixed precision, up to 16 bits": """
config = QConfig(
    global_config=QLayerConfig(activation=Int8Spec(), weight=Int8Spec()),
    algo_config=[AutoMixprecisionConfig(
        target_layer_config={QLayerConfig(activation=Int16Spec(), weight=Int16Spec()): [conv],
                             QLayerConfig(activation=Int16Spec()): []},
        target_op_type=("Conv", "ConvTranspose", "Gemm", "MatMul"), data_size=10, metric_default="sqnr",
        metric_threshold=-38, metric_optimize_object="quality", sensitivity_cache_file="sensitivity.json")])
""",
    "MX by its attributes": """
from quark.onnx.quantization.config.config import Config, QuantizationConfig
config = Config(global_quant_config=QuantizationConfig(
    calibrate_method=CalibrationMethod.MinMax, quant_format=ExtendedQuantFormat.QDQ,
    activation_type=ExtendedQuantType.QMX, weight_type=ExtendedQuantType.QMX,
    extra_options={"MXAttributes": {"element_dtype": "fp8_e4m3", "axis": 1, "block_size": 32, "rounding_mode": 2}}))
""",
    "Olive: enums as text, algorithms filled field by field": """
from quark.onnx.quantization.config.algorithm import AdaRoundConfig, CLEConfig
from quark.onnx.quantization.config.spec import CalibMethod, QLayerConfig, QuantGranularity, ScaleType
def said(value):
    return f"{value.__class__.__name__}.{value.name}"
tensor = {"data_type": "Int8", "symmetric": True, "scale_type": said(ScaleType.PowerOf2),
          "calibration_method": said(CalibMethod.MinMSE), "quant_granularity": said(QuantGranularity.Tensor)}
adaround = AdaRoundConfig()
adaround.num_iterations, adaround.lr_adjust, adaround.beta_range = 3, tuple([]), tuple([20, 2])
config = QConfig(
    global_config=QLayerConfig.from_dict({"input_tensors": dict(tensor), "weight": dict(tensor)}),
    specific_layer_config={}, layer_type_config={}, exclude=[], algo_config=[CLEConfig(), adaround],
    **{"Int32Bias": False})
""",
    "Olive: what was not given is None": """
config = QConfig(global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
                 specific_layer_config=None, layer_type_config=None, exclude=None, algo_config=[])
""",
}
"""Each makes a `config`."""

TORCH = {
    "MXFP4 by groups, as blogs write it": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Config, FP4PerGroupSpec, QuantizationConfig
def spec(group_size, scale_format="e8m0", scale_calculation_mode="even", is_dynamic=True):
    return FP4PerGroupSpec(ch_axis=-1, group_size=group_size, scale_format=scale_format,
                           scale_calculation_mode=scale_calculation_mode, is_dynamic=is_dynamic).to_quantization_spec()
layers = QuantizationConfig(input_tensors=spec(32, "e8m0", "even", True), weight=spec(32, "e8m0", "even", False))
model = ModelQuantizer(Config(global_quant_config=layers, exclude=["lm_head"])).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.5
""",
    "file to file": """
import json
from quark.torch import LLMTemplate, ModelQuantizer
folder = save()
with open(f"{folder}/config.json") as file:
    template = LLMTemplate.get(json.load(file)["model_type"])
config = template.get_config(scheme="mxfp4", exclude_layers=["*self_attn*", "*lm_head"])
ModelQuantizer(config).direct_quantize_checkpoint(pretrained_model_path=folder, save_path="quantized")
""",
    "Olive: FP8 with a cache": """
import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.utils.llm import get_model, get_tokenizer, prepare_for_moe_quant, revert_model_patching
folder = save()
model, _ = get_model(folder, "auto", "cpu", multi_gpu=False, multi_device=False, attn_implementation="eager",
                     trust_remote_code=False)
prepare_for_moe_quant(model)
get_tokenizer(folder, max_seq_len=64, model_type=model.config.model_type, trust_remote_code=False)
config = LLMTemplate.get("llama").get_config(
    scheme="fp8", algorithm=None, kv_cache_scheme="fp8", min_kv_scale=0.0, layer_config=None, attention_scheme=None,
    exclude_layers=None)
config.kv_cache_post_rope = True
quantizer = ModelQuantizer(config, multi_device=False)
model = quantizer.freeze(quantizer.quantize_model(model, data))
revert_model_patching(model)
with torch.no_grad():
    export_safetensors(model=model, output_dir="out", custom_mode="quark", weight_format="real_quantized",
                       pack_method="reorder")
""",
    "Olive: ONNX and GGUF": """
import torch
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_onnx
folder = save()
for scheme in ("int8", "uint4_wo_32"):
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme, algorithm=None))
    model = quantizer.freeze(quantizer.quantize_model(llama(), data))
    with torch.inference_mode():
        if scheme == "int8":
            export_onnx(model=model, output_dir="onnx", input_args=next(iter(data)), uint4_int4_flag=False)
        else:
            export_gguf(model, output_dir="gguf", model_type="llama", tokenizer_path=folder)
""",
    "a template with the algorithms of a JSON file": """
import json
from quark.torch import LLMTemplate
from quark.torch.quantization.config.config import load_quant_algo_config_from_file
for name, parameters in {"awq": {"model_decoder_layers": "model.layers"}, "gptq": {"damp_percent": 0.01}}.items():
    with open(f"{name}.json", "w") as file:
        json.dump({"name": name, **parameters}, file)
template = LLMTemplate(
    model_type="mine", kv_layers_name=["*k_proj", "*v_proj"], q_layer_name="*q_proj",
    gate_up_layers_name=["gate_proj", "up_proj"], exclude_layers_name=["lm_head"],
    algorithm_configs={name: load_quant_algo_config_from_file(f"{name}.json") for name in ("awq", "gptq")})
config = template.get_config(scheme="int4_wo_64", algorithm="awq,gptq")
assert [algorithm.name for algorithm in config.algo_config] == ["awq", "gptq"]
""",
    "the maps of algorithms": """
from quark.torch import LLMTemplate
from quark.torch.quantization.config.algo_configs import AWQ_MAP, get_algo_config, get_supported_algorithm_types
assert get_algo_config("AWQ", "llama") is AWQ_MAP["llama"] and "gptq" in get_supported_algorithm_types()
config = LLMTemplate.get("llama").get_config("uint4_wo_32", algorithm=["awq"], algo_configs={"awq": AWQ_MAP["llama"]})
assert config.algo_config == [AWQ_MAP["llama"]] and AWQ_MAP["llama"].scaling_layers
""",
    "vLLM: MX without instructions for it": """
import torch
from quark.torch.kernel import mx
from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_fp4_fp6_per_group_with_scale
from quark.torch.quantization.utils import even_round, reshape_to_blocks
x = torch.randn(4, 64, dtype=torch.bfloat16)
largest = reshape_to_blocks(x, 32, -1).abs().amax(-1)
found = fake_quantize_fp4_fp6_per_group_with_scale(
    x, even_round(largest, "fp4").to(x.device), axis=-1, group_size=32, quant_dtype="fp4")
assert torch.equal(found, mx.qdq_mxfp4(x, "even"))
""",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("title", ONNX)
def test_an_onnx_model_is_quantized(title: str, place: Path) -> None:
    onnx.save(cnn(), "float.onnx")
    conv = [node.name for node in cnn().graph.node if node.op_type == "Conv"][1]
    names: dict[str, Any] = {"onnx": onnx, "conv": conv}
    exec("from quark.onnx import *\n" + ONNX[title], names)
    names["ModelQuantizer"](names["config"]).quantize_model("float.onnx", "quantized.onnx", Reader(images()))
    assert len(onnx.load("quantized.onnx").graph.node) > len(cnn().graph.node)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return workplace()


@pytest.mark.parametrize("title", TORCH)
def test_a_torch_snippet_runs(title: str, names: dict[str, Any], place: Path) -> None:
    exec(TORCH[title], {**names, "__name__": "snippet"})
