"""The program that reads the tables of layers against the source of a server, on a package of three files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.facts.confirmed import confirms_experts, confirms_fused
from benchmarks.facts.float_layers import rows
from benchmarks.facts.source_tree import SourceTree
from quark.goals.expert_names import EXPERT_NAMES
from quark.goals.fused_layers import FUSED_LAYERS

FILES = {
    "registry.py": "MODELS = {'SomeForCausalLM': ('some', 'SomeForCausalLM'), 'SomeMTP': ('some', 'SomeMTP')}",
    "parts.py": """
class Indexer:
    def __init__(self, quant_config):
        self.wk_weights = MergedLinear(8, quant_config=None)
        self.wq = Linear(8, quant_config=quant_config)
        self.either = Linear(8, quant_config=None)
        if quant_config:
            self.either = Linear(8, quant_config=quant_config)
        if quant_config:
            self.q_k = Linear(8)
        else:
            self.q = Linear(8, quant_config=quant_config)
            self.k = Linear(8, quant_config=quant_config)
class Pooled:
    def __init__(self, quant_config):
        self.q = Linear(8, quant_config=quant_config)
""",
    "some.py": """
from vllm.model_executor.models.parts import Indexer, Pooled
STACKED = [("wk_weights", "wk", 0), ("wk_weights", "weights", 1)]
class Layer:
    def __init__(self, quant_config):
        indexer_cls = Pooled if quant_config else Indexer
        self.indexer = indexer_cls(quant_config)
        self.mlp = Mixture()
class Mixture:
    def __init__(self):
        self.experts = FusedMoEFactory(8, ckpt_names=("w1", "w2", "w3"))
class SomeForCausalLM:
    def __init__(self):
        self.layers = [Layer(None)]
class MultiTokenPredictorLayer:
    def __init__(self):
        self.eh_proj = nn.Linear(8, 8)
class SomeMTP:
    def __init__(self):
        self.layers = [MultiTokenPredictorLayer()]
""",
}


SOME = "model_executor/models/some.py"


def written(root: Path) -> SourceTree:
    """A package of the files, and a block of experts that names their layers."""
    folder = root / "vllm" / "model_executor" / "models"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return SourceTree(root / "vllm")


def test_what_is_built_without_a_quantization_is_found_by_its_names_in_the_folder(tmp_path: Path) -> None:
    found = {layer: models for layer, (models, _) in rows(written(tmp_path)).items()}
    inside = ("k", "q", "q_k", "weights", "wk")
    assert found == {"eh_proj": ("*",)} | {f"indexer.{layer}": ("SomeForCausalLM",) for layer in inside}


def test_rows_of_fused_layers_and_of_experts_are_confirmed_by_what_the_files_say_only(tmp_path: Path) -> None:
    tree = written(tmp_path)
    fused = replace(FUSED_LAYERS[0], fused="wk_weights", members=("wk", "weights"), source=(SOME,))
    assert confirms_fused(tree, fused)
    assert not confirms_fused(tree, replace(fused, members=("wk", "wq")))
    assert not confirms_fused(tree, replace(fused, fused="wq"))
    assert not confirms_fused(tree, replace(fused, source=("models",)))
    apart = replace(fused, fused="", members=("wk", "indexer"))
    assert confirms_fused(tree, apart) and not confirms_fused(tree, replace(apart, members=("wk", "nobody")))
    experts = replace(EXPERT_NAMES[0], place="mlp.experts", leaves=("w1", "w3", "w2"), source=SOME)
    assert confirms_experts(tree, experts)
    assert not confirms_experts(tree, replace(experts, place="block_sparse_moe.experts"))
    assert not confirms_experts(tree, replace(experts, leaves=("gate_proj", "up_proj", "down_proj")))
    assert not confirms_experts(tree, replace(experts, source="model_executor/models/nobody.py"))
