"""What the tutorials and example scripts do: composed algorithms, fine-tuning, scopes in graphs, attention."""

from __future__ import annotations

SCALING = """
SCALING = [
    {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
     "inp": "self_attn.q_proj", "module2inspect": "self_attn"},
    {"prev_op": "post_attention_layernorm", "layers": ["mlp.gate_proj", "mlp.up_proj"], "inp": "mlp.gate_proj",
     "module2inspect": "mlp"},
    {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"}]
"""

SNIPPETS = {
    "AutoSmoothQuant from a file, in a template": SCALING
    + """
import json
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.config.config import load_quant_algo_config_from_file
with open("custom.json", "w") as file:
    json.dump({"name": "autosmoothquant", "scaling_layers": SCALING, "model_decoder_layers": "model.layers",
               "compute_scale_loss": "MAE"}, file)
template = LLMTemplate(model_type="llama", exclude_layers_name=["lm_head"],
                       autosmoothquant_config=load_quant_algo_config_from_file("custom.json"))
config = template.get_config(scheme="uint4_wo_128", algorithm=["autosmoothquant"])
assert config.algo_config[0].compute_scale_loss == "MAE"
model = ModelQuantizer(config, multi_device=True).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "rotation, AutoSmoothQuant and GPTQ in this order": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(scheme="int4_wo_64", algorithm=["rotation", "autosmoothquant", "gptq"])
assert [algorithm.name for algorithm in config.algo_config] == ["rotation", "autosmoothquant", "gptq"]
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "export without freezing": """
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from transformers import AutoModelForCausalLM
config = LLMTemplate.get("llama").get_config(scheme="fp8")
model = ModelQuantizer(config).quantize_model(AutoModelForCausalLM.from_pretrained(save()).eval(), data)
export_safetensors(model=model, output_dir="./quantized")
tokenizer.save_pretrained("./quantized")
loaded = AutoModelForCausalLM.from_pretrained("./quantized").eval()
assert distance(loaded, llama()) < 0.2
""",
    "queries, keys and values in attention": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(scheme="fp8", kv_cache_scheme="fp8", attention_scheme="fp8")
assert config.softmax_quant_spec is not None
model = ModelQuantizer(config).quantize_model(llama(attn_implementation="eager"), data)
assert 0 < distance(model, llama()) < 0.2
""",
    "NVFP4 with calibrated global scales": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config(scheme="nvfp4", exclude_layers=["lm_head", "*self_attn*"])
model = ModelQuantizer(config).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.3
""",
    "training of int4 groups": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerGroupMinMaxObserver
spec = QTensorConfig(dtype=Dtype.int4, observer_cls=PerGroupMinMaxObserver, symmetric=True,
                     scale_type=ScaleType.float, round_method=RoundType.half_even, qscheme=QSchemeType.per_group,
                     ch_axis=1, is_dynamic=False, group_size=32)
quantizer = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec)))
model = quantizer.quantize_model(llama(), data)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(8):
    logits = model(ids).logits[:, :-1].reshape(-1, model.config.vocab_size)
    loss = nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model = quantizer.freeze(model.eval())
assert losses[-1] < losses[0] - 0.1
assert len(model.model.layers[0].mlp.up_proj.weight[0, :32].unique()) <= 16
""",
    "scopes by QuantStub": """
from quark.torch.quantization.graph.ops.quant_stubs import DeQuantStub, QuantStub
assert QuantStub is not None and DeQuantStub is not None
""",
    "BFP16 by its observer": """
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer.observer import PerBlockBFPObserver
spec = QTensorConfig(dtype=Dtype.int8, symmetric=True, observer_cls=PerBlockBFPObserver,
                     qscheme=QSchemeType.per_group, is_dynamic=True, ch_axis=-1, scale_type=ScaleType.float,
                     group_size=8, round_method=RoundType.half_even)
model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < 0.05
""",
    "specs of the custom configurations": """
from quark.torch.quantization import (
    FP4PerGroupSpec, FP6E2M3PerGroupSpec, FP6E3M2PerGroupSpec, FP8E4M3PerChannelSpec, FP8E4M3PerGroupSpec,
    FP8E5M2PerGroupSpec, Int3PerChannelSpec, Int4PerTensorSpec, Int8PerGroupSpec, OCP_MXFP4DiffsSpec,
    Uint4PerChannelSpec, Uint8PerGroupSpec, Uint8PerTensorSpec)
made = [
    FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False, scale_format="e8m0", scale_calculation_mode="even"),
    FP6E2M3PerGroupSpec(ch_axis=-1, group_size=32, scale_format="e8m0", scale_calculation_mode="even"),
    FP6E3M2PerGroupSpec(ch_axis=-1, group_size=32, scale_format="e8m0", scale_calculation_mode="even"),
    FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1), FP8E4M3PerGroupSpec(ch_axis=-1, group_size=128),
    FP8E5M2PerGroupSpec(ch_axis=-1, group_size=128),
    Int3PerChannelSpec(symmetric=False, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False),
    Int4PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                      is_dynamic=False),
    Int8PerGroupSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                     group_size=128),
    OCP_MXFP4DiffsSpec(ch_axis=-1, is_dynamic=False),
    Uint4PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False),
    Uint8PerGroupSpec(symmetric=False, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                      group_size=128),
    Uint8PerTensorSpec(observer_method="MSE", symmetric=False, scale_type="float", round_method="half_even",
                       is_dynamic=False)]
assert len({spec.to_quantization_spec().dtype.name for spec in made}) == 10
""",
    "groups of 8 bits": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerGroupSpec, Uint8PerGroupSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
for made, symmetric in ((Int8PerGroupSpec, True), (Uint8PerGroupSpec, False)):
    spec = made(symmetric=symmetric, scale_type="float", round_method="half_even", ch_axis=1, is_dynamic=False,
                group_size=64).to_quantization_spec()
    model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec))).quantize_model(llama())
    assert 0 < distance(model, llama()) < 0.02
""",
    "per token, dynamic": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerChannelSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
weight = Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=0,
                            is_dynamic=False).to_quantization_spec()
token = Int8PerChannelSpec(symmetric=True, scale_type="float", round_method="half_even", ch_axis=1,
                           is_dynamic=True).to_quantization_spec()
config = QConfig(global_quant_config=QLayerConfig(weight=weight, input_tensors=token), exclude=["lm_head"])
model = ModelQuantizer(config).quantize_model(llama())
assert 0 < distance(model, llama()) < 0.05
""",
    "perplexity by hand": """
from quark.torch import LLMTemplate, ModelQuantizer
model = ModelQuantizer(LLMTemplate.get("llama").get_config("mxfp6_e3m2")).quantize_model(llama())
with torch.no_grad():
    losses = []
    for batch in data:
        logits = model(batch)["logits"]
        losses.append(nn.CrossEntropyLoss()(logits[:, :-1].reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1)))
    perplexity = torch.exp(torch.stack(losses).mean())
assert 1 < perplexity.item() < 2 * len(tokenizer)
""",
    "layers that keep their dtype in a template": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config("int4_wo_32", layer_config={"*down_proj": "fp8", "*o_proj": "fp8"})
model = ModelQuantizer(config).quantize_model(llama(), data)
plain = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32")).quantize_model(llama(), data)
assert 0 < distance(model, llama()) < distance(plain, llama())
""",
    "configs and models are used again": """
from quark.torch import LLMTemplate, ModelQuantizer
config = LLMTemplate.get("llama").get_config("uint4_wo_32")
first = ModelQuantizer(config).quantize_model(llama())
second = ModelQuantizer(config).quantize_model(llama())
assert distance(first, second) == 0
""",
    "a pruned or custom module within a model": """
from quark.torch import ModelQuantizer
from quark.torch.quantization import Int8PerTensorSpec
from quark.torch.quantization.config.config import QConfig, QLayerConfig
spec = Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even",
                         is_dynamic=False).to_quantization_spec()

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = net()
        self.up = nn.ConvTranspose2d(3, 3, 2, stride=2)

    def forward(self, x):
        return self.inner(self.up(x))

model = ModelQuantizer(QConfig(global_quant_config=QLayerConfig(weight=spec, input_tensors=spec))).quantize_model(
    Outer().eval(), [images])
with torch.no_grad():
    error = (model(images) - Outer().eval()(images)).norm() / Outer().eval()(images).norm()
assert 0 < error < 0.1
""",
}
