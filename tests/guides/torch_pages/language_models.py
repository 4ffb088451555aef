"""LLMTemplate, schemes, KV cache, algorithms, exports, file to file."""

from __future__ import annotations

SNIPPETS = {
    "templates are listed": """
from quark.torch import LLMTemplate
assert {"llama", "opt", "qwen2", "mistral"} <= set(LLMTemplate.list_available())
assert {"fp8", "int8", "mxfp4", "uint4_wo_128"} <= set(LLMTemplate.get_supported_schemes())
""",
    "a template with all options": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(
    scheme="int4_wo_128", algorithm="awq", kv_cache_scheme="fp8", min_kv_scale=1.0,
    layer_config={"*.mlp.gate_proj": "mxfp4_weight_only", "*.mlp.up_proj": "mxfp4_weight_only"},
    exclude_layers=["lm_head"])
assert config.exclude == ["lm_head"] and config.min_kv_scale == 1.0
assert {"*.mlp.gate_proj", "*.mlp.up_proj"} <= set(config.layer_quant_config)
assert config.algo_config[0].name == "awq"
""",
    "a new template": """
from quark.torch import LLMTemplate
template = LLMTemplate(model_type="kimi_like", kv_layers_name=["*kv_b_proj"], exclude_layers_name=["lm_head"])
LLMTemplate.register_template(template)
config = LLMTemplate.get("kimi_like").get_config(scheme="fp8", kv_cache_scheme="fp8")
assert config.exclude == ["lm_head"] and set(config.kv_cache_quant_config) == {"*kv_b_proj"}
""",
    "a scheme of one's own": """
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
LLMTemplate.register_scheme("custom_int8_wo", config=QLayerConfig(weight=spec))
config = LLMTemplate.get("llama").get_config(scheme="custom_int8_wo")
model = ModelQuantizer(config).quantize_model(llama())
assert 0 < distance(model, llama()) < 0.05
""",
    "KV cache by layer configs": """
from dataclasses import replace
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(input_tensors=fp8, weight=fp8), exclude=["lm_head"])
both = QLayerConfig(input_tensors=fp8, weight=fp8, output_tensors=fp8)
config = replace(config, layer_quant_config={"*v_proj": both, "*k_proj": both})
plain = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(input_tensors=fp8, weight=fp8),
                               exclude=["lm_head"])).quantize_model(llama(), data)
model = ModelQuantizer(config).quantize_model(llama(), data)
assert distance(model, plain) > 0 and distance(model, llama()) < 0.2
""",
    "KV cache by its own config": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(weight=fp8), exclude=["lm_head"],
                 kv_cache_quant_config={"*k_proj": QLayerConfig(output_tensors=fp8),
                                        "*v_proj": QLayerConfig(output_tensors=fp8)},
                 kv_cache_group=["*k_proj", "*v_proj"], min_kv_scale=0.001)
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.2
""",
    "SmoothQuant on two layers": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig, SmoothQuantConfig

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(64)
        self.lin1 = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.lin1(self.layer_norm(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block()])
        self.layers[0].layer_norm.weight.data[:2] = 30

    def forward(self, x):
        return self.layers[0](x)

x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=False, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
layer = QLayerConfig(weight=spec, input_tensors=spec)
smooth = SmoothQuantConfig(scaling_layers=[{"prev_op": "layer_norm", "layers": ["lin1"], "inp": "lin1"}],
                           model_decoder_layers="layers", alpha=0.5, scale_clamp_min=1e-12)
errors = []
with torch.no_grad():
    for algorithms in ([], [smooth]):
        config = QConfig(global_quant_config=layer, algo_config=algorithms or None)
        model = ModelQuantizer(config).quantize_model(Model().eval(), [{"x": x}])
        errors.append(float((model(x) - Model().eval()(x)).norm()))
assert errors[1] < errors[0] / 2
""",
    "AWQ with its lists": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import AWQConfig, QConfig, QLayerConfig, Uint4PerGroupSpec
spec = Uint4PerGroupSpec(symmetric=False, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                         group_size=64).to_quantization_spec()
attention = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
awq = AWQConfig(scaling_layers=[
    {"prev_op": "input_layernorm", "layers": attention, "inp": "self_attn.q_proj", "module2inspect": "self_attn"},
    {"prev_op": "post_attention_layernorm", "layers": ["mlp.gate_proj", "mlp.up_proj"], "inp": "mlp.gate_proj",
     "module2inspect": "mlp", "help": "linear 1"},
    {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj", "help": "linear 2"}],
    model_decoder_layers="model.layers")
config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=[awq], exclude=["lm_head"])
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "GPTQ with its lists": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import GPTQConfig, QConfig, QLayerConfig, Uint4PerGroupSpec
spec = Uint4PerGroupSpec(symmetric=False, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                         group_size=64).to_quantization_spec()
gptq = GPTQConfig(damp_percent=0.01, desc_act=True, static_groups=True, inside_layer_modules=[
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj",
    "mlp.down_proj"], model_decoder_layers="model.layers")
config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=[gptq], exclude=["lm_head"])
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "Qronos with its lists": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int4PerGroupSpec, QConfig, QLayerConfig, QronosConfig
spec = Int4PerGroupSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                        group_size=64).to_quantization_spec()
qronos = QronosConfig(inside_layer_modules=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                      "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"],
                      model_decoder_layers="model.layers", block_size=128, desc_act=True, static_groups=True,
                      alpha=1e-3, beta=1e4)
config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=[qronos], exclude=["lm_head"])
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "rotation with its lists": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig, RotationConfig
layer = "model.layers.layer_id"
attention = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
mlp = [f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"]
inner = {"prev_modules": [f"{layer}.self_attn.o_proj"], "norm_module": f"{layer}.post_attention_layernorm",
         "next_modules": mlp}
rotation = RotationConfig(model_decoder_layers="model.layers", scaling_layers={
    "first_layer": [{"prev_modules": ["model.embed_tokens"], "norm_module": f"{layer}.input_layernorm",
                     "next_modules": attention}, inner],
    "middle_layers": [{"prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"],
                       "norm_module": f"{layer}.input_layernorm", "next_modules": attention}, inner],
    "last_layer": [{"prev_modules": [f"{layer}.mlp.down_proj"], "norm_module": "model.norm",
                    "next_modules": ["lm_head"]}]})
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(weight=spec), algo_config=[rotation], exclude=["lm_head"])
model = ModelQuantizer(config).quantize_model(llama(), data)
assert not torch.allclose(model.model.embed_tokens.weight, llama().model.embed_tokens.weight)
assert 0 < distance(model, llama()) < 0.05
""",
    "algorithms from a file": """
import json
from quark.torch.quantization.config.config import load_quant_algo_config_from_file
with open("gptq.json", "w") as file:
    json.dump({"name": "gptq", "damp_percent": 0.02, "desc_act": False, "static_groups": True,
               "inside_layer_modules": ["mlp.up_proj"], "model_decoder_layers": "model.layers"}, file)
config = load_quant_algo_config_from_file("gptq.json")
assert config.name == "gptq" and config.damp_percent == 0.02 and config.inside_layer_modules == ["mlp.up_proj"]
""",
    "export and reload": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from transformers import AutoConfig, AutoModelForCausalLM
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("fp8"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval(), data))
export_safetensors(model=model, output_dir="./quantized")
with torch.device("meta"):
    backbone = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("tiny_llama"))
loaded = import_model_from_safetensors(backbone, model_dir="./quantized", device="cpu")
assert distance(loaded.eval(), model) < 1e-3
""",
    "export for AWQ loaders": """
import json
from pathlib import Path
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("uint4_wo_32"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval()))
export_safetensors(model=model, output_dir="./quantized", custom_mode="awq")
assert json.loads(Path("quantized/config.json").read_text())["quantization_config"]["quant_method"] == "awq"
""",
    "export for FP8 loaders": """
import json
from pathlib import Path
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("fp8"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval(), data))
export_safetensors(model=model, output_dir="./quantized", custom_mode="fp8")
assert json.loads(Path("quantized/config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
""",
    "export of weights that are rounded only": """
from safetensors.torch import load_file
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int8"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval(), data))
export_safetensors(model=model, output_dir="./rounded", weight_format="fake_quantized")
weight = load_file("rounded/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
assert weight.is_floating_point() and len(weight.unique()) <= 256
""",
    "export to ONNX": """
import onnx
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec)))
model = quantizer.freeze(quantizer.quantize_model(net(), [images]))
export_onnx(model=model, output_dir="./onnx", input_args=images)
kinds = {node.op_type for node in onnx.load("onnx/quark_model.onnx").graph.node}
assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= kinds
""",
    "from file to file": """
import json
from pathlib import Path
from quark.torch import LLMTemplate, ModelQuantizer
model_path = save()
model_type = json.loads(Path(model_path, "config.json").read_text())["model_type"]
config = LLMTemplate.get(model_type).get_config(scheme="fp8", exclude_layers=["*self_attn*", "*lm_head"])
config.global_quant_config.input_tensors = None
ModelQuantizer(config).direct_quantize_checkpoint(pretrained_model_path=model_path, save_path="out", device="cpu")
stored = json.loads(Path("out/config.json").read_text())["quantization_config"]
assert stored["quant_method"] == "quark" and list(Path("out").glob("*.safetensors"))
""",
    "loading with transformers": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int8"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval(), data))
export_safetensors(model, "./quantized")
loaded = AutoModelForCausalLM.from_pretrained("./quantized").eval()
assert distance(loaded, model) < 1e-3
""",
    "helpers of scripts": """
from quark.torch.utils.llm import get_calib_dataloader, get_model, get_tokenizer
folder = save()
model, dtype = get_model(folder, "float32", "cpu", None, False, "eager", trust_remote_code=False)
tokens = get_tokenizer(folder, max_seq_len=32, model_type="llama", trust_remote_code=False)
assert dtype in (torch.float32, "float32") and model.config.model_type == "llama"
assert len(tokens("some text").input_ids) > 0
""",
}

# Largest distance of the logits: 4 bits lose a tenth to a fifth of a random model, 8 bits a hundredth.
BOUNDS = {
    "int4_wo_32": 0.3,
    "int4_wo_128": 0.3,
    "int4_wo_per_channel": 0.3,
    "uint4_wo_64": 0.3,
    "int8": 0.05,
    "fp8": 0.1,
    "ptpc_fp8": 0.1,
    "mxfp6_e2m3": 0.1,
    "mxfp4_weight_only": 0.3,
    "mx9": 0.05,
    "bfp16": 0.05,
}
for _scheme, _bound in BOUNDS.items():
    SNIPPETS[f"scheme {_scheme}"] = f"""
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(scheme={_scheme!r})
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < {_bound}
"""
for _algorithm in ("awq", "gptq", "smoothquant", "autosmoothquant", "rotation"):
    _scheme = "int8" if "smooth" in _algorithm or _algorithm == "rotation" else "uint4_wo_64"
    SNIPPETS[f"template with {_algorithm}"] = f"""
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(scheme={_scheme!r}, algorithm={_algorithm!r})
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
"""
