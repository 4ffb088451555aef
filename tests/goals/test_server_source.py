"""The program that reads which layers a server builds in float, on a package of three files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.facts.float_layers import rows
from benchmarks.facts.source_tree import SourceTree

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
""",
    "some.py": """
from vllm.model_executor.models.parts import Indexer
STACKED = [("wk_weights", "wk", 0), ("wk_weights", "weights", 1)]
class Layer:
    def __init__(self, quant_config):
        self.indexer = Indexer(quant_config)
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


def test_what_is_built_without_a_quantization_is_found_by_its_names_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "vllm" / "model_executor" / "models"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    found = {layer: models for layer, (models, _) in rows(SourceTree(tmp_path / "vllm")).items()}
    assert found == {"eh_proj": ("*",), "indexer.weights": ("SomeForCausalLM",), "indexer.wk": ("SomeForCausalLM",)}
