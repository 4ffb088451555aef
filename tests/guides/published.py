"""What published scripts do, restated with small models: pages, examples, notebooks and other programs.

Each piece runs with the names of `workplace` in a folder of its own, and asserts its effect. None uses what only this
package has, so all can be run with the documented system, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.guides import torch_pages


def workplace() -> dict[str, Any]:
    """What scripts take for granted.

    Returns:
        dict: The names of `torch_pages.workplace()`; `onnx` and `np`; `cnn(path)`, which writes a classifier of (n, 3,
        16, 16) with input "x", and `mlp(path)`, of (n, 16); `Reader`, as scripts write one; `kinds(path)`, the
        operators of a file; `read(path)`, what a JSON file holds.
    """
    import numpy as np
    import onnx

    from tests.models import onnx_zoo

    class Reader:
        def __init__(self, count: int = 4, feeds: Any = onnx_zoo.images) -> None:
            self.feeds, self.iterator = feeds(count), None

        def get_next(self) -> Any:
            if self.iterator is None:
                self.iterator = iter(self.feeds)
            return next(self.iterator, None)

        def rewind(self) -> None:
            self.iterator = None

        reset = rewind

    names = torch_pages.workplace()
    small = names["llama"]

    def llama(**options: Any) -> Any:
        return small(**{"hidden_size": 64, "intermediate_size": 128, **options})

    def save(folder: str = "tiny_llama", **options: Any) -> str:
        llama(**options).save_pretrained(folder)
        names["tokenizer"].save_pretrained(folder)
        return folder

    def written(model: Any) -> Any:
        def write(path: str) -> str:
            onnx.save(model(), path)
            return path

        return write

    def read(path: str | Path) -> Any:
        return json.loads(Path(path).read_text(encoding="utf-8"))

    def kinds(path: str) -> set[str]:
        return {node.op_type for node in onnx.load(path).graph.node}

    return names | {
        "llama": llama,
        "save": save,
        "np": np,
        "onnx": onnx,
        "cnn": written(onnx_zoo.cnn),
        "mlp": written(onnx_zoo.mlp),
        "Reader": Reader,
        "vectors": onnx_zoo.vectors,
        "kinds": kinds,
        "read": read,
    }


INT8 = """
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig
int8 = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()
"""

LANGUAGE_MODELS = {
    "the example script: a template, a ModelExporter": """
from quark.torch import LLMTemplate
from quark.torch.export.api import ModelExporter
from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.api import ModelQuantizer
quant_config = LLMTemplate.get("llama").get_config(
    scheme="fp8", algorithm=None, kv_cache_scheme="fp8", attention_scheme=None)
model = ModelQuantizer(quant_config, False).quantize_model(llama(), data)
export_config = ExporterConfig(
    json_export_config=JsonExporterConfig(weight_format="real_quantized", pack_method="reorder"))
ModelExporter(config=export_config, export_dir="output_dir").export_safetensors_model(
    model=model, quant_config=quant_config)
from safetensors.torch import load_file
assert "model.layers.1.self_attn.k_proj.weight_scale" in load_file("output_dir/model.safetensors")
""",
    "PTPC FP8 by its two specs, without data": """
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization import FP8E4M3PerChannelSpec
from quark.torch.quantization.config.config import Config, QuantizationConfig
channel = FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0).to_quantization_spec()
token = FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1).to_quantization_spec()
quant_config = Config(
    global_quant_config=QuantizationConfig(input_tensors=token, weight=channel), exclude=["lm_head"])
quantizer = ModelQuantizer(quant_config)
model = quantizer.freeze(quantizer.quantize_model(llama()))
export_safetensors(model, "tiny-FP8-ptpc")
from safetensors.torch import load_file
assert load_file("tiny-FP8-ptpc/model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
""",
    "vLLM: FP8, a cache, AutoSmoothQuant from a file": """
import json
from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization import (Config, FP8E4M3PerTensorSpec, QuantizationConfig,
                                      load_quant_algo_config_from_file)
spec = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
everywhere = QuantizationConfig(input_tensors=spec, weight=spec)
caches = ["*k_proj", "*v_proj"]
cached = {name: QuantizationConfig(input_tensors=spec, weight=spec, output_tensors=spec) for name in caches}
with open("autosmoothquant_config.json", "w") as file:
    json.dump({"name": "autosmoothquant", "model_decoder_layers": "model.layers", "scaling_layers": [
        {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
         "inp": "self_attn.q_proj", "module2inspect": "self_attn"},
        {"prev_op": "post_attention_layernorm", "layers": ["mlp.gate_proj", "mlp.up_proj"], "inp": "mlp.gate_proj",
         "module2inspect": "mlp", "help": "linear 1"}]}, file)
algorithm = load_quant_algo_config_from_file("autosmoothquant_config.json")
quant_config = Config(global_quant_config=everywhere, layer_quant_config=cached, kv_cache_quant_config=cached,
                      exclude=["lm_head"], algo_config=[algorithm])
quantizer = ModelQuantizer(quant_config)
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_config = ExporterConfig(json_export_config=JsonExporterConfig())
export_config.json_export_config.kv_cache_group = caches
with torch.no_grad():
    ModelExporter(config=export_config, export_dir="fp8-kv").export_safetensors_model(
        model, quant_config=quant_config, tokenizer=tokenizer)
assert read("fp8-kv/config.json")["quantization_config"]["kv_cache_quant_config"]
""",
    "a processor is saved into the folder before the model": """
from pathlib import Path
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
folder = Path("output_dir")
folder.mkdir(parents=True, exist_ok=True)
tokenizer.save_pretrained(folder)
(folder / "chat_template.jinja").write_text("{{ messages }}")
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme="ptpc_fp8"))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
with torch.no_grad():
    export_safetensors(model=model, output_dir=str(folder), custom_mode="quark", weight_format="real_quantized",
                       pack_method="reorder")
assert {"chat_template.jinja", "tokenizer.json", "config.json"} <= {file.name for file in folder.iterdir()}
""",
    "files that are no weights are copied into the folder first": """
import shutil
from pathlib import Path
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
source, target = Path(save()), Path("quantized")
target.mkdir(parents=True, exist_ok=True)
for file in source.iterdir():
    if file.suffix != ".safetensors":
        shutil.copy2(file, target / file.name)
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32", exclude_layers=["*mlp.gate*"]))
export_safetensors(quantizer.freeze(quantizer.quantize_model(llama())), str(target))
assert "quantization_config" in read(target / "config.json")
""",
    "from file to file, for more than memory holds": """
from quark.torch import LLMTemplate, ModelQuantizer
folder = save()
template = LLMTemplate.get(read(f"{folder}/config.json")["model_type"])
quant_config = template.get_config(
    scheme="mxfp4", exclude_layers=["*self_attn*", "*mlp.gate", "*mlp.gate.linear", "*lm_head"])
ModelQuantizer(quant_config).direct_quantize_checkpoint(
    pretrained_model_path=folder, save_path="quantized", device="cpu")
from safetensors.torch import load_file
stored = load_file("quantized/model.safetensors")
assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
assert stored["model.layers.0.self_attn.q_proj.weight"].is_floating_point()
""",
    "from file to file, attention in another scheme": """
from quark.torch import LLMTemplate, ModelQuantizer
quant_config = LLMTemplate.get("llama").get_config(scheme="mxfp4", layer_config={"*self_attn*": "ptpc_fp8"})
ModelQuantizer(quant_config).direct_quantize_checkpoint(
    pretrained_model_path=save(), save_path="quantized", device="cpu")
from safetensors.torch import load_file
stored = load_file("quantized/model.safetensors")
assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
""",
    "from file to file, by specs, on the CPU": INT8
    + """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int8PerChannelSpec
channel = Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0,
                             is_dynamic=False).to_quantization_spec()
token = Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=1,
                           is_dynamic=True).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(weight=channel, input_tensors=token), exclude=["lm_head"])
ModelQuantizer(config).direct_quantize_checkpoint(
    pretrained_model_path=save(), save_path="w8a8", device="cpu")
from safetensors.torch import load_file
assert load_file("w8a8/model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
""",
    "a template and a scheme of one's own": """
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QLayerConfig
template = LLMTemplate(model_type="internlm9", kv_layers_name=["*wqkv"], q_layer_name="*wqkv",
                       exclude_layers_name=["lm_head"])
LLMTemplate.register_template(template)
scheme = f"int8_weights_{len(LLMTemplate.get_supported_schemes())}"
LLMTemplate.register_scheme(scheme, config=QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec()))
assert "internlm9" in LLMTemplate.list_available()
config = LLMTemplate.get("internlm9").get_config(scheme)
assert config.exclude == ["lm_head"] and config.global_quant_config.input_tensors is None
assert 0 < distance(ModelQuantizer(config).quantize_model(llama()), llama()) < 0.1
""",
    "AWQ, written for AWQ's loaders": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("uint4_wo_32", algorithm="awq"))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "awq", custom_mode="awq")
from safetensors.torch import load_file
assert "model.layers.0.mlp.up_proj.qweight" in load_file("awq/model.safetensors")
""",
    "GPTQ by a JSON file, written and loaded": """
import json
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import load_quant_algo_config_from_file
with open("gptq.json", "w") as file:
    json.dump({"name": "gptq", "block_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": True,
               "model_decoder_layers": "model.layers",
               "inside_layer_modules": ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj",
                                        "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"]}, file)
config = LLMTemplate.get("llama").get_config(
    "int4_wo_32", algorithm="gptq", algo_configs={"gptq": load_quant_algo_config_from_file("gptq.json")})
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "gptq")
loaded = import_model_from_safetensors(llama(), model_dir="gptq")
assert distance(loaded, model) < 1e-3
""",
    "rotation and GPTQ, composed": """
import json
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.quantization.config.config import load_quant_algo_config_from_file
layer = "model.layers.layer_id"
files = {
    "rotation": {"name": "rotation", "backbone": "model", "model_decoder_layers": "model.layers",
                 "r1": True, "r2": False, "r3": False, "r4": False, "online_r1_rotation": False,
                 "scaling_layers": {
                     "first_layer": [{"prev_modules": ["model.embed_tokens"], "norm_module": f"{layer}.input_layernorm",
                                      "next_modules": [f"{layer}.self_attn.{x}_proj" for x in "qkv"]},
                                     {"prev_modules": [f"{layer}.self_attn.o_proj"],
                                      "norm_module": f"{layer}.post_attention_layernorm",
                                      "next_modules": [f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"]}],
                     "middle_layers": [{"prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"],
                                        "norm_module": f"{layer}.input_layernorm",
                                        "next_modules": [f"{layer}.self_attn.{x}_proj" for x in "qkv"]},
                                       {"prev_modules": [f"{layer}.self_attn.o_proj"],
                                        "norm_module": f"{layer}.post_attention_layernorm",
                                        "next_modules": [f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"]}],
                     "last_layer": [{"prev_modules": [f"{layer}.mlp.down_proj"], "norm_module": "model.norm",
                                     "next_modules": ["lm_head"]}]}},
    "gptq": {"name": "gptq", "damp_percent": 0.01, "desc_act": False, "static_groups": True,
             "model_decoder_layers": "model.layers", "inside_layer_modules": ["mlp.up_proj", "mlp.gate_proj"]},
}
for name, fields in files.items():
    with open(f"{name}.json", "w") as file:
        json.dump(fields, file)
read = {name: load_quant_algo_config_from_file(f"{name}.json") for name in files}
config = LLMTemplate.get("llama").get_config("int4_wo_32", algorithm=["rotation", "gptq"], algo_configs=read)
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "composed")
assert 0 < distance(model, llama()) < 0.5
""",
    "SmoothQuant with scaling layers": """
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config.config import SmoothQuantConfig
smooth = SmoothQuantConfig(alpha=0.5, scale_clamp_min=1e-3, model_decoder_layers="model.layers", scaling_layers=[
    {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
     "inp": "self_attn.q_proj", "module2inspect": "self_attn"}])
config = LLMTemplate.get("llama").get_config("int8", algorithm="smoothquant", algo_configs={"smoothquant": smooth})
assert 0 < distance(ModelQuantizer(config).quantize_model(llama(), data), llama()) < 0.1
""",
    "GGUF": """
from pathlib import Path
from transformers import AutoModelForCausalLM
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf
folder = save()
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("uint4_wo_32", algorithm="awq"))
model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(folder), data))
with torch.inference_mode():
    export_gguf(model, output_dir="gguf", model_type="llama", tokenizer_path=folder)
assert Path("gguf/llama.gguf").read_bytes()[:4] == b"GGUF"
""",
    "ONNX of a language model": """
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int8"))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
with torch.inference_mode():
    export_onnx(model=model, output_dir="onnx_out", input_args=next(iter(data)), uint4_int4_flag=False)
assert "QuantizeLinear" in kinds("onnx_out/quark_model.onnx")
""",
    "rounded weights, for programs without quark": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("mxfp4_weight_only", exclude_layers=["lm_head"]))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "rounded", weight_format="fake_quantized")
config = read("rounded/config.json")
from safetensors.torch import load_file
weight = load_file("rounded/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
assert weight.is_floating_point() and len(weight[0, :32].unique()) <= 16
""",
    "transformers loads the folder": """
from transformers import AutoModelForCausalLM
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8"))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "quantized")
tokenizer.save_pretrained("quantized")
loaded = AutoModelForCausalLM.from_pretrained("quantized")
assert distance(loaded.eval(), model) < 0.05
""",
    "int4 codes over FP8, for mixtures": """
from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec, Int4PerChannelSpec, ProgressiveSpec, QConfig, QLayerConfig)
weight = ProgressiveSpec(
    first_stage=FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=False),
    second_stage=Int4PerChannelSpec(symmetric=True, scale_type="float32", round_method="half_even", ch_axis=0,
                                    is_dynamic=False)).to_quantization_spec()
inputs = FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float32", is_dynamic=True).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=inputs), exclude=["lm_head"])
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "int4-fp8")
assert 0 < distance(model, llama()) < 0.5
""",
    "MXFP4 and MXFP6, mixed by layer": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
config = LLMTemplate.get("llama").get_config(
    "mxfp4", layer_config={"*down_proj": "mxfp6_e2m3", "*o_proj": "fp8"}, exclude_layers=["lm_head", "*layers.0.mlp*"])
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "mixed")
assert 0 < distance(model, llama()) < 0.5
""",
    "NVFP4": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("nvfp4", exclude_layers=["*lm_head*", "*.mlp.gate"]))
model = quantizer.freeze(quantizer.quantize_model(llama(), data))
export_safetensors(model, "nvfp4")
assert 0 < distance(model, llama()) < 0.5
""",
    "a mixture, its router in float": """
from transformers import AutoModelForCausalLM, MixtralConfig
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.utils.llm import preprocess_for_quantization
torch.manual_seed(0)
sizes = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_local_experts=4,
             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
model = AutoModelForCausalLM.from_config(MixtralConfig(**sizes), dtype=torch.float32).eval()
preprocess_for_quantization(model)
config = LLMTemplate.get("mixtral").get_config("mxfp4", exclude_layers=["lm_head", "*gate", "*self_attn*"])
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(model, data))
export_safetensors(model, "mixtral-mxfp4")
from safetensors.torch import load_file
assert any(tensor.dtype == torch.uint8 for tensor in load_file("mixtral-mxfp4/model.safetensors").values())
""",
    "attention in FP8": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config("fp8", kv_cache_scheme="fp8", attention_scheme="fp8", min_kv_scale=1.0)
assert 0 < distance(ModelQuantizer(config).quantize_model(llama(), data), llama()) < 0.3
""",
    "perplexity of the quantized model": """
from quark.contrib.llm_eval import ppl_eval
from quark.torch import LLMTemplate, ModelQuantizer
model = ModelQuantizer(LLMTemplate.get("llama").get_config("mx6")).quantize_model(
    llama(max_position_embeddings=2048), data)
encoded = tokenizer("A text that is read again and again. " * 400, return_tensors="pt")
assert 1 < ppl_eval(model, encoded, "cpu") < 10 * len(tokenizer)
""",
    "parameters are saved and loaded": INT8
    + """
from quark.torch import ModelQuantizer, load_params, save_params
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=int8, input_tensors=int8)))
model = quantizer.freeze(quantizer.quantize_model(net(), [images]))
save_params(model, model_type="net", export_dir="model_params")
loaded = load_params(net(), json_path="model_params/net.json", safetensors_path="model_params/net.safetensors")
with torch.no_grad():
    assert torch.allclose(loaded(images), model(images), atol=1e-5)
""",
    "steps are timed": """
from pathlib import Path
from quark.common.profiler import GlobalProfiler, ProfileStep
from quark.torch import LLMTemplate, ModelQuantizer
profiler = GlobalProfiler(output_path="quark_profile.yaml")
with profiler.scope(ProfileStep.MODEL_LOADING):
    model = llama()
ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32")).quantize_model(model, data)
""",
    "training with 2-bit weights": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int2PerGroupSpec, QConfig, QLayerConfig
spec = Int2PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec), exclude=["lm_head"]))
student = quantizer.quantize_model(llama(), data)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
losses = []
for _ in range(6):
    with torch.no_grad():
        wanted = llama()(ids).logits.log_softmax(-1)
    found = student(ids).logits.log_softmax(-1)
    loss = nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
student = quantizer.freeze(student.eval())
assert losses[-1] < losses[0] and len(student.model.layers[0].mlp.up_proj.weight[0, :32].unique()) <= 4
""",
}

NETWORKS = {
    "graph mode, to ONNX": """
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerTensorPowOf2MinMSEObserver
spec = QTensorConfig(dtype=Dtype.int8, qscheme=QSchemeType.per_tensor, observer_cls=PerTensorPowOf2MinMSEObserver,
                     symmetric=True, scale_type=ScaleType.float, round_method=RoundType.half_even, is_dynamic=False)
layer = QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec, bias=spec)
config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
graph = torch.export.export(net(), (images,)).module()
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(graph, [images]))
export_onnx(model=model, output_dir="onnx_out", input_args=images)
assert "QuantizeLinear" in kinds("onnx_out/quark_model.onnx")
""",
    "a network in pieces of FP8, with RuntimeOptions": """
from quark.torch.quantization.api import ModelQuantizer, RuntimeOptions
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
spec = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval()
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    wanted = block(x)
config = QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec), exclude=["*time_emb*"])
quantizer = ModelQuantizer(config)
block = quantizer.freeze(quantizer.quantize_model(block, [x]))
options = RuntimeOptions(native_linear_mode="fp8_per_tensor")
with torch.no_grad():
    assert 0 < (block(x) - wanted).norm() / wanted.norm() < 0.1
""",
    "SVDQuant by its ready-made schemes": """
from quark.torch import ModelQuantizer
from quark.torch.algorithm.svdquant import build_quant_layer_config
from quark.torch.quantization.config.config import QConfig, SVDQuantConfig
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
algorithm = SVDQuantConfig(svd_rank=32, search_alpha=False, exclude_patterns=["*time_embedding*", "lm_head"])
config = QConfig(global_quant_config=build_quant_layer_config("w4a16"), exclude=["lm_head", "*correction*"],
                 algo_config=[algorithm])
model = ModelQuantizer(config).quantize_model(llama(**sizes), data)
assert 0 < distance(model, llama(**sizes)) < 0.3
""",
    "a denoiser is quantized and written": INT8
    + """
from diffusers import UNet2DModel
from quark.torch import ModelQuantizer, export_safetensors
torch.manual_seed(0)
unet = UNet2DModel(sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 32),
                   down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                   norm_num_groups=8).eval()
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=int8)))
sample = {"sample": torch.randn(1, 3, 8, 8), "timestep": torch.tensor([1])}
unet = quantizer.freeze(quantizer.quantize_model(unet, [sample]))
export_safetensors(unet, "pipe/unet")
assert read("pipe/unet/config.json")["quantization_config"]["quant_method"] == "quark"
""",
    "the older names of configurations": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerGroupMinMaxObserver
spec = QuantizationSpec(dtype=Dtype.uint4, observer_cls=PerGroupMinMaxObserver, symmetric=False,
                        scale_type=ScaleType.float, round_method=RoundType.half_even, qscheme=QSchemeType.per_group,
                        ch_axis=1, is_dynamic=False, group_size=32)
config = Config(global_quant_config=QuantizationConfig(weight=spec))
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(nn.Sequential(nn.Linear(64, 8)), [torch.randn(2, 64)]))
assert len(model[0].weight[0, :32].unique()) <= 16
""",
    "calibration by percentiles and mean squared errors": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig
for method in ("MSE", "percentile", "histogram"):
    spec = Int8PerTensorSpec(observer_method=method, symmetric=True, scale_type="float", round_method="half_even",
                             is_dynamic=False).to_quantization_spec()
    layer = QLayerConfig(input_tensors=spec, weight=spec)
    model = ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(net(), [images])
    with torch.no_grad():
        assert (model(images) - net()(images)).norm() / net()(images).norm() < 0.5, method
""",
    "recorded arguments, which a wrapper takes apart": INT8
    + """
from dataclasses import replace
from torch.utils.data import Dataset
from quark.torch import ModelQuantizer
class Recorded(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        if index >= 2:
            raise IndexError(index)
        return (((images[index : index + 1],), {}),)
class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner_model = inner
    def forward(self, data):
        return self.inner_model(*data[0][0], **data[0][1])
config = replace(QConfig(global_quant_config=QLayerConfig(weight=int8, input_tensors=int8)), exclude=["*conv_in*"])
inner = ModelQuantizer(config).quantize_model(Wrapper(net()), Recorded()).inner_model
with torch.no_grad():
    assert 0 < (inner(images) - net()(images)).norm() / net()(images).norm() < 0.1
""",
    "messages of a script's own": """
from quark.common.utils.log import ScreenLogger
logger = ScreenLogger(__name__)
logger.info("[INFO]: Registered a template")
""",
}

ONNX = {
    "getting started: a preset, a reader": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quantizer = ModelQuantizer(Config(global_quant_config=get_default_config("A8W8")))
quantizer.quantize_model(cnn("float.onnx"), "quantized.onnx", Reader())
assert "QuantizeLinear" in kinds("quantized.onnx")
""",
    "Ryzen AI: XINT8 with CLE, by specs": """
from quark.onnx import CLEConfig, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
config = QConfig(global_config=QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec()), algo_config=[CLEConfig()],
                 EnableNPUCnn=True, exclude=[])
ModelQuantizer(config).quantize_model(cnn("float.onnx"), "xint8.onnx", Reader())
assert "QuantizeLinear" in kinds("xint8.onnx")
""",
    "Ryzen AI: A16W8, AdaQuant": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.algorithm import AdaQuantConfig, CLEConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec, Int16Spec, QLayerConfig
activation, weight = Int16Spec(), Int8Spec()
activation.set_calibration_method(CalibMethod.MinMax)
weight.set_calibration_method(CalibMethod.MinMax)
learned = AdaQuantConfig(data_size=4, batch_size=2, num_iterations=3, learning_rate=1e-5, early_stop=True)
config = QConfig(global_config=QLayerConfig(activation=activation, weight=weight), algo_config=[CLEConfig(), learned],
                 use_external_data_format=False, exclude=[], EnableNPUCnn=False, AlignSlice=False, FoldRelu=True,
                 AlignConcat=True, AlignEltwiseQuantType=True)
ModelQuantizer(config).quantize_model(cnn("float.onnx"), "a16w8.onnx", Reader())
stored = {tensor.data_type for tensor in onnx.load("a16w8.onnx").graph.initializer}
assert onnx.TensorProto.INT16 in stored and onnx.TensorProto.INT8 in stored
""",
    "Ryzen AI: nodes and subgraphs stay float": """
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
nodes = [node.name for node in onnx.load(cnn("float.onnx")).graph.node]
config = QConfig(global_config=QLayerConfig(activation=XInt8Spec(), weight=XInt8Spec()),
                 exclude=[nodes[-1], ([nodes[0]], [nodes[2]])], EnableNPUCnn=True)
ModelQuantizer(config).quantize_model("float.onnx", "quantized.onnx", Reader())
assert "QuantizeLinear" in kinds("quantized.onnx")
""",
    "Ryzen AI: BF16": """
from quark.onnx import BFloat16Spec, CalibMethod, ModelQuantizer, QConfig, QLayerConfig
spec = BFloat16Spec()
spec.set_calibration_method(CalibMethod.MinMax)
config = QConfig(global_config=QLayerConfig(activation=spec, weight=spec), BF16QDQToCast=True,
                 QuantizeAllOpTypes=True, ForceQuantizeNoInputCheck=True)
ModelQuantizer(config).quantize_model(cnn("float.onnx"), "bf16.onnx", Reader())
assert "Cast" in kinds("bf16.onnx")
""",
    "BFP16 by a preset": """
from quark.onnx import ModelQuantizer, QConfig
ModelQuantizer(QConfig.get_default_config("BFP16")).quantize_model(cnn("float.onnx"), "bfp16.onnx", Reader())
assert "BFPQuantizeDequantize" in kinds("bfp16.onnx")
""",
    "MX by a preset, its options changed": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("MXINT8_ADAQUANT")
quant_config.extra_options["FastFinetune"].update(LearningRate=1e-7, EarlyStop=False, NumIterations=2, DataSize=4)
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(cnn("float.onnx"), "mx.onnx", Reader())
assert "MXQuantizeDequantize" in kinds("mx.onnx")
""",
    "percentiles of each layer, with little memory": """
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
activation, weight = Int8Spec(), Int8Spec()
activation.set_symmetric(False)
activation.set_calibration_method(CalibMethod.LayerwisePercentile)
weight.set_calibration_method(CalibMethod.MinMax)
config = QConfig(global_config=QLayerConfig(activation=activation, weight=weight), AlignSlice=False, FoldRelu=True,
                 AlignConcat=True, CalibOptimizeMem=True, CalibOptimizeDisk=True,
                 CalibPassthroughOpTypes=["Reshape", "MaxPool", "Split"])
ModelQuantizer(config).quantize_model(cnn("float.onnx"), "quantized.onnx", Reader())
assert "QuantizeLinear" in kinds("quantized.onnx")
""",
    "mixed precision by sensitivity": """
from quark.onnx import AutoMixprecisionConfig, Int8Spec, Int16Spec, ModelQuantizer, QConfig, QLayerConfig
base = QLayerConfig(activation=Int16Spec(), weight=Int16Spec())
mixed = AutoMixprecisionConfig(
    target_layer_config={QLayerConfig(activation=Int8Spec(), weight=Int8Spec()): []}, data_size=4)
config = QConfig(global_config=base, algo_config=[mixed], Int32Bias=False, Int16Bias=False)
ModelQuantizer(config).quantize_model(cnn("float.onnx"), "mixed.onnx", Reader())
assert "QuantizeLinear" in kinds("mixed.onnx")
""",
    "dynamic quantization": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
config = Config(global_quant_config=get_default_config("UINT8_DYNAMIC_QUANT"))
ModelQuantizer(config).quantize_model(mlp("float.onnx"), "dynamic.onnx", calibration_data_path=None)
assert "DynamicQuantizeLinear" in kinds("dynamic.onnx")
""",
    "4-bit weights of matrix products": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("MATMUL_NBITS")
quant_config.extra_options["MatMulNBitsParams"]["GroupSize"] = 16
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
    mlp("float.onnx"), "nbits.onnx", Reader(feeds=vectors))
assert "MatMulNBits" in kinds("nbits.onnx")
""",
    "int8 weights alone": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("S8S8_AAWS")
quant_config.extra_options["WeightsOnly"] = True
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
    mlp("float.onnx"), "weights.onnx", Reader(feeds=vectors))
assert "DequantizeLinear" in kinds("weights.onnx") and "QuantizeLinear" not in kinds("weights.onnx")
""",
    "SmoothQuant of matrix products": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("INT8_TRANSFORMER_DEFAULT")
quant_config.include_sq = True
quant_config.extra_options["SmoothAlpha"] = 0.5
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
    mlp("float.onnx"), "smooth.onnx", Reader(feeds=vectors))
assert "QuantizeLinear" in kinds("smooth.onnx")
""",
    "FP8 by types of onnxruntime": """
from onnxruntime.quantization.calibrate import CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantFormat, QuantType
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config.config import Config
from quark.onnx.quantization.config.legacy import QuantizationConfig
quant_config = QuantizationConfig(
    calibrate_method=CalibrationMethod.MinMax, quant_format=QuantFormat.QDQ, activation_type=QuantType.QFLOAT8E4M3FN,
    weight_type=QuantType.QFLOAT8E4M3FN, op_types_to_quantize=["MatMul", "Gemm"], per_channel=False, include_cle=False,
    extra_options={"WeightsOnly": True, "ActivationSymmetric": True, "QuantizeBias": False})
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
    mlp("float.onnx"), "fp8.onnx", Reader(feeds=vectors))
stored = {tensor.data_type for tensor in onnx.load("fp8.onnx").graph.initializer}
assert onnx.TensorProto.FLOAT8E4M3FN in stored
""",
    "crypto mode: models in memory, onnxruntime first": """
import onnxruntime
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("XINT8")
quant_config.crypto_mode = True
quantized = ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(
    onnx.load(cnn("float.onnx")), None, Reader())
assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}
""",
    "a configuration as JSON": """
import json
from quark.onnx import CLEConfig, Int16Spec, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
conv = [node.name for node in onnx.load(cnn("float.onnx")).graph.node if node.op_type == "Conv"][:1]
first = QConfig(global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
                specific_layer_config={QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec()): conv},
                layer_type_config={None: ["Gemm"]}, algo_config=[CLEConfig(cle_steps=2)],
                extra_options={"SimplifyModel": False, "Int32Bias": False})
with open("config.json", "w") as file:
    json.dump(first.to_dict(), file)
config = QConfig.from_dict(read("config.json"))
assert config.to_dict() == first.to_dict()
ModelQuantizer(config).quantize_model("float.onnx", "quantized.onnx", Reader())
assert "QuantizeLinear" in kinds("quantized.onnx")
""",
    "the one call of older versions": """
from onnxruntime.quantization import QuantFormat, QuantType
from quark.onnx import PowerOfTwoMethod, quantize_static
quantize_static(model_input=cnn("float.onnx"), model_output="static.onnx", calibration_data_reader=Reader(),
                calibrate_method=PowerOfTwoMethod.MinMSE, quant_format=QuantFormat.QDQ, activation_type=QuantType.QInt8,
                weight_type=QuantType.QInt8, enable_npu_cnn=True, extra_options={"ActivationSymmetric": True})
assert "QuantizeLinear" in kinds("static.onnx")
""",
    "weights in a file beside the model": """
from pathlib import Path
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("A8W8")
quant_config.use_external_data_format = True
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(cnn("float.onnx"), "large.onnx", Reader())
assert "QuantizeLinear" in kinds("large.onnx")
""",
    "input in NHWC, calibrated by the model's own reader": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("XINT8")
quant_config.extra_options["ConvertNCHWToNHWC"] = True
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(cnn("float.onnx"), "nhwc.onnx", Reader())
shape = onnx.load("nhwc.onnx").graph.input[0].type.tensor_type.shape.dim
assert shape[3].dim_value == 3
""",
    "no data": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("XINT8")
quant_config.extra_options["UseRandomData"] = True
quant_config.extra_options["RandomDataReaderInputShape"] = {"x": [1, 3, 16, 16]}
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(cnn("float.onnx"), "random.onnx", None)
assert "QuantizeLinear" in kinds("random.onnx")
""",
    "biases corrected, one tensor overridden": """
from onnxruntime.quantization import QuantType
from quark.onnx import BiasCorrectionConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
pooled = next(node.output[0] for node in onnx.load(cnn("float.onnx")).graph.node if node.op_type == "MaxPool")
config = QConfig(global_config=QLayerConfig(activation=Int8Spec(), weight=Int8Spec()),
                 algo_config=[BiasCorrectionConfig()],
                 extra_options={"TensorQuantOverrides": {pooled: [{"quant_type": QuantType.QInt16}]}})
ModelQuantizer(config).quantize_model("float.onnx", "quantized.onnx", Reader())
assert onnx.TensorProto.INT16 in {tensor.data_type for tensor in onnx.load("quantized.onnx").graph.initializer}
""",
    "every preset of Ryzen AI by its constant": """
from copy import deepcopy
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import custom_config
from quark.onnx.quantization.config.config import Config
for name in ("XINT8", "A8W8", "S16S8_ASWS"):
    config = Config(global_quant_config=deepcopy(getattr(custom_config, f"{name}_CONFIG")))
    ModelQuantizer(config).quantize_model(cnn("float.onnx"), f"{name}.onnx", Reader())
    assert "QuantizeLinear" in kinds(f"{name}.onnx")
""",
    "what a quantized model computes is dumped": """
from pathlib import Path
from quark.onnx import ModelQuantizer, dump_model
from quark.onnx.quantization.config import Config, get_default_config
ModelQuantizer(Config(global_quant_config=get_default_config("XINT8"))).quantize_model(
    cnn("float.onnx"), "xint8.onnx", Reader())
dump_model("xint8.onnx", Reader(1), random_data_reader_input_shape={}, dump_float=True, output_dir="dump_results")
assert len(list(Path("dump_results").iterdir())) > 10
""",
    "tools: a file to float16 and back": """
import subprocess, sys
for tool, source, target in (("convert_fp32_to_fp16", "float.onnx", "half.onnx"),
                             ("convert_fp16_to_fp32", "half.onnx", "again.onnx")):
    cnn("float.onnx")
    subprocess.run([sys.executable, "-m", f"quark.onnx.tools.{tool}", "--input", source, "--output", target],
                   check=True, capture_output=True)
assert onnx.load("again.onnx").graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
""",
    "a driver of mixed precision, by JSON": """
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.quantization.config.custom_config import DEFAULT_MICROEXPONENTS_PARAMS
from quark.onnx.quantization.config.spec import BFloat16Spec, MX6Spec
conv = [node.name for node in onnx.load(cnn("float.onnx")).graph.node if node.op_type == "Conv"][:2]
wide = QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())
config = QConfig(global_config=QLayerConfig(input_tensors=MX6Spec(), weight=MX6Spec()),
                 specific_layer_config={wide: conv[:1]}, layer_type_config=None, exclude=conv[1:],
                 extra_options={"BFPAttributes": DEFAULT_MICROEXPONENTS_PARAMS, "NodesToExclude": conv[1:]})
ModelQuantizer(config).quantize_model("float.onnx", "mixed.onnx", Reader())
assert "BFPQuantizeDequantize" in kinds("mixed.onnx")
""",
    "a search over settings": """
from quark.onnx import auto_search
from quark.onnx.quantization.config import Config, get_default_config
class Settings(auto_search.AutoSearchConfig):
    search_space = {"calibrate_method": [__import__("quark.onnx").onnx.CalibrationMethod.MinMax],
                    "include_cle": [False, True], "extra_options": {"ActivationSymmetric": [True]}}
    search_metric, search_algo, search_evaluator, search_metric_tolerance = "L2", "grid_search", None, 1e9
    search_cache_dir, search_output_dir, search_log_path = "./", "./", "./auto_search.log"
    search_stop_condition = {"find_n_candidates": 1, "iteration_limit": 2, "time_limit": 100.0}
search = auto_search.AutoSearch(config=Config(global_quant_config=get_default_config("S8S8_AAWS")),
                                auto_search_config=Settings(), model_input=cnn("float.onnx"),
                                calibration_data_reader=Reader())
search.all_configs = search.build_all_configs(Settings.search_space)
assert search.all_configs
search.search_model()
""",
    "ranges are kept between two runs": """
from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config
quant_config = get_default_config("A8W8")
quant_config.extra_options["SaveAndRestore"] = "ranges.json"
ModelQuantizer(Config(global_quant_config=quant_config)).quantize_model(cnn("float.onnx"), "quantized.onnx", Reader())
assert "QuantizeLinear" in kinds("quantized.onnx")
""",
    "custom operators in a session": """
import onnxruntime
from quark.onnx import ModelQuantizer, QConfig, get_library_path
ModelQuantizer(QConfig.get_default_config("MX9")).quantize_model(cnn("float.onnx"), "mx9.onnx", Reader())
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(get_library_path("CPU"))
session = onnxruntime.InferenceSession("mx9.onnx", options, providers=["CPUExecutionProvider"])
assert np.isfinite(session.run(None, Reader(1).get_next())[0]).all()
""",
}

PIECES = LANGUAGE_MODELS | NETWORKS | ONNX
