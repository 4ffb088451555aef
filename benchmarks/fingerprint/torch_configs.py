"""Every shorthand spec and observer, other layers than linear ones, cache and attention, graph mode, training."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.fingerprint.outputs import OUT, add, attempt, hash_arrays
from benchmarks.fingerprint.torch_models import (
    LLAMA,
    Convolutions,
    EveryLayer,
    computed,
    language_model,
    linears,
    logits,
    quantized,
    tokens,
    vectors,
)
from quark.core.schemes import SCHEMES
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, load_params, save_params
from quark.torch.quantization import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config import config as specs
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType
from quark.torch.quantization.graph.ops.quant_stubs import DeQuantStub, QuantStub
from quark.torch.quantization.observer import observer as observers

ARGUMENTS = {"ch_axis": -1, "group_size": 32, "block_size": 32, "is_dynamic": False}
"""Of specs: where they must be given."""
SPECS = [name for name in dir(specs) if name.endswith("Spec") and hasattr(getattr(specs, name), "dtype")]
OBSERVERS = [name for name in dir(observers) if name.startswith("Per") and name.endswith(("Observer", "Pro"))]
FP8, INT8 = specs.FP8E4M3PerTensorSpec(), specs.Int8PerTensorSpec()


def make_spec(name: str, **options: Any) -> Any:
    """A shorthand spec with what its class asks for."""
    made = getattr(specs, name)
    needed = {key: value for key, value in ARGUMENTS.items() if key in inspect.signature(made).parameters}
    return made(**{**needed, **{key: value for key, value in options.items() if key in needed}})


def saved(layer: QLayerConfig, name: str = "linears") -> str:
    """Two linear layers under a config, in the files of save_params, and what they compute."""
    model = quantized(QConfig(global_quant_config=layer), linears(), vectors())
    save_params(model, name, export_dir=OUT, compressed=True)
    return computed(model, vectors()[1])


def shorthand(spec: str) -> str:
    """A spec for weights, for inputs, and for inputs with live scales."""
    weight = attempt(lambda: saved(QLayerConfig(weight=make_spec(spec)), "weight"))
    static = attempt(lambda: saved(QLayerConfig(input_tensors=make_spec(spec)), "input"))
    return (
        weight + static + attempt(lambda: saved(QLayerConfig(input_tensors=make_spec(spec, is_dynamic=True)), "live"))
    )


def two_stages(kind: str) -> str:
    first = specs.FP8E4M3PerTensorSpec(scale_type="float32")
    if kind == "progressive":
        return saved(QLayerConfig(weight=specs.ProgressiveSpec(first, specs.Int4PerChannelSpec(ch_axis=0))))
    groups = specs.FP4PerGroupSpec(ch_axis=-1, group_size=16, is_dynamic=False)
    return saved(QLayerConfig(weight=specs.ScaleQuantSpec(groups, replace(first, scale_type=None))))


def ranges(observer: str) -> str:
    """Weights and static activations of several types under the ranges of an observer."""
    types = (("int8", True), ("uint4", False), ("fp8_e4m3", True))
    return "".join(
        attempt(observed, observer, tensor, *kind) for tensor in ("weight", "input_tensors") for kind in types
    )


def observed(observer: str, tensor: str, dtype: str, symmetric: bool) -> str:
    family = QSchemeType.per_tensor
    options: dict[str, Any] = {}
    if "PerChannel" in observer:
        family, options = QSchemeType.per_channel, {"ch_axis": 0 if tensor == "weight" else -1}
    elif "Block2D" in observer:
        family, options = QSchemeType.per_block, {"block_size": (16, 16)}
    elif "PerGroup" in observer or "PerBlock" in observer:
        family, options = QSchemeType.per_group, {"ch_axis": -1, "group_size": 32}
    config = QTensorConfig(
        dtype=Dtype[dtype], observer_cls=getattr(observers, observer), qscheme=family, symmetric=symmetric,
        round_method=RoundType.half_even, scale_type=ScaleType.float, is_dynamic=False, **options,
    )  # fmt: skip
    return saved(QLayerConfig(**{tensor: config}), f"{tensor}_{dtype}")


def layers(scheme: str) -> str:
    """One of each kind of layer; the tables of embeddings, too."""
    torch.manual_seed(0)
    ids = [torch.randint(0, 64, (2, 16)) for _ in range(2)]
    # What a table reads are indices: none of its inputs can be quantized.
    table = scheme if SCHEMES[scheme].input is None else "int8_wo"
    tables = {nn.Embedding: table, nn.EmbeddingBag: table}
    config = LLMTemplate.get("auto").get_config(scheme, exclude_layers=[], layer_type_config=tables)
    model = quantized(config, EveryLayer().eval(), ids)
    file = save_params(model, "layers", export_dir=OUT, compressed=True)
    again = load_params(EveryLayer().eval(), str(file), str(file.with_suffix(".safetensors")))
    return computed(model, ids[1]) + computed(again, ids[1])


def attention(form: str, options: dict[str, Any]) -> str:
    """A quantized cache and quantized attention."""
    model = quantized(LLAMA.get_config(**options), language_model(torch.float32), tokens())
    export_safetensors(model, OUT / "model", form)
    return logits(model)


def loaded(scheme: str, cache: str | None) -> str:
    """A checkpoint as transformers loads it."""
    config = LLAMA.get_config(scheme, kv_cache_scheme=cache)
    export_safetensors(quantized(config, language_model(), tokens()), OUT / "model")
    return logits(AutoModelForCausalLM.from_pretrained(OUT / "model").eval())


def cache_in_full(post_rope: bool) -> str:
    """The same in the words of QConfig."""
    cache = QLayerConfig(output_tensors=FP8)
    config = QConfig(
        global_quant_config=QLayerConfig(weight=INT8),
        kv_cache_quant_config={"*k_proj": cache, "*v_proj": cache},
        kv_cache_group=["*k_proj", "*v_proj"],
        min_kv_scale=0.01,
        kv_cache_post_rope=post_rope,
        softmax_quant_spec=FP8,
        exclude=["@output_head"],
    )
    model = quantized(config, language_model(torch.float32), tokens())
    export_safetensors(model, OUT / "model")
    return logits(model)


LEARNED: dict[str, Any] = {"fixed": INT8} | {
    name: QTensorConfig(
        dtype=Dtype.int4, observer_cls=getattr(observers, name), qscheme=QSchemeType.per_tensor, symmetric=True,
        scale_type=ScaleType.float, round_method=RoundType.half_even, is_dynamic=False,
    )
    for name in ("LSQObserver", "TQTObserver")
}  # fmt: skip


class Marked(Convolutions):
    """The same, quantized from one place to another."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities (n, 5)."""
        x = QuantStub(self.stem(images))
        x = DeQuantStub(torch.cat([self.norm(self.conv(x)) + x, x], dim=1))
        return torch.softmax(self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)), dim=-1)


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 3, 8, 8)


def convolutions(graph: bool, kind: type[Convolutions] = Convolutions) -> Any:
    """The network, or its graph with a batch of any size."""
    torch.manual_seed(0)
    model = kind().eval()
    if not graph:
        return model
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    return torch.export.export(model, (images(),), dynamic_shapes=shapes).module()


def trained(layer: QLayerConfig, graph: bool, steps: int) -> str:
    """The network after quantization and some steps of training; its tensors, and what it computes."""
    mode = QuantizationMode.fx_graph_mode if graph else QuantizationMode.eager_mode
    quantizer = ModelQuantizer(QConfig(global_quant_config=layer, quant_mode=mode))
    model = quantizer.quantize_model(convolutions(graph), [images()])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    model = quantizer.freeze(model)
    state = model.state_dict()
    names = "\n".join(f"{name} {hash_arrays([state[name].detach().float()])}" for name in sorted(state))
    return f"{names}\n{computed(model, images())}"


def saved_graph(scheme: str, kind: type[Convolutions] = Convolutions) -> str:
    """A quantized graph, saved and loaded; the file is a zip with times in it, so its values are hashed."""
    layer = LLMTemplate.get("auto").get_config(scheme).global_quant_config
    config = QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)
    model = quantized(config, convolutions(True, kind), [images()])
    path = save_params(model, "graph", args=(images(),), export_dir="graph", quant_mode=config.quant_mode)
    again = load_params(pth_path=str(path), quant_mode=config.quant_mode)
    return computed(model, images()) + computed(again, images())


def templates() -> str:
    """What the templates say of their families, as JSON, and read again."""
    options: dict[str, Any] = {"kv_cache_scheme": "fp8", "attention_scheme": "fp8"}
    said = []
    for model_type in LLMTemplate.list_available():
        config = LLMTemplate.get(model_type).get_config("uint4_wo_64", "awq", **options).to_dict()
        said.append(json.dumps([model_type, config, QConfig.from_dict(config).to_dict()]))
    return "\n".join(said)


for _spec in SPECS:
    add(f"torch/specs/{_spec}", shorthand, _spec)
for _kind in ("progressive", "scales"):
    add(f"torch/specs/{_kind}", two_stages, _kind)
for _observer in OBSERVERS:
    add(f"torch/observers/{_observer}", ranges, _observer)
for _scheme in SCHEMES:
    add(f"torch/layers/{_scheme}", layers, _scheme)
for _scheme in ("int8", "fp8", "int8_wo", "int8_dynamic", "uint4_wo_per_channel", "mxfp4", "nvfp4"):
    add(f"torch/graph/{_scheme}", saved_graph, _scheme)
add("torch/graph/region", saved_graph, "int8", Marked)
for _form in ("quark", "fp8", "compressed-tensors"):
    add(f"torch/cache/fp8/{_form}", attention, _form, {"scheme": "fp8", "kv_cache_scheme": "fp8"})
_both = {"scheme": "uint4_wo_32", "kv_cache_scheme": "int8", "attention_scheme": "fp8"}
add("torch/cache/int8_attention/quark", attention, "quark", _both)
for _scheme, _cache in (("int8", None), ("uint4_wo_64", "fp8"), ("mxfp4", None), ("nvfp4", "int8")):
    add(f"torch/transformers/{_scheme}", loaded, _scheme, _cache)
for _post_rope in (False, True):
    add(f"torch/cache/in_full/{'after' if _post_rope else 'before'}_rope", cache_in_full, _post_rope)
for _name, _tensor_config in LEARNED.items():
    for _graph in (False, True):
        for _steps in (0, 3):
            _layer = QLayerConfig(weight=_tensor_config, input_tensors=_tensor_config)
            add(f"torch/training/{_name}/{'graph' if _graph else 'eager'}/{_steps}", trained, _layer, _graph, _steps)
add("torch/templates", templates)
