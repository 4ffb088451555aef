"""Names of experts: under which vLLM looks for the layers of experts in a quantized folder, one expert after the other.

    model.layers.3.mlp.experts.5.gate_proj.weight = prefix of the block, place, number, leaf, tensor

What has another name it passes over, or stops at. Read from the source of vLLM 0.33.0: `ckpt_names` of FusedMoEFactory
and `make_expert_params_mapping` of its models, and the attribute of a block that holds the experts; paths are of
model_executor/models. The names are those of folders, before `hf_to_vllm_mapper`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SPLIT = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ExpertNames:
    """One row.

    Attributes:
        model_types: Of config.json.
        place: The experts within a block.
        leaves: Last names of the layers of an expert.
        source: File of vLLM.
        quark: Element types of weights whose experts it loads from `quark` folders; empty: all that it has kernels for.
        other_formats: Whether it is known to look for them so in folders of other formats, too.
    """

    model_types: tuple[str, ...]
    place: str
    leaves: tuple[str, ...]
    source: str
    quark: tuple[str, ...] = ()
    other_formats: bool = True

    def finds(self, layer: str) -> bool:
        """Whether vLLM has a place for a layer of an expert, by its name in the folder."""
        leaves = "|".join(map(re.escape, self.leaves))
        return re.search(rf"\.{re.escape(self.place)}\.\d+\.({leaves})$", layer) is not None


EXPERT_NAMES: tuple[ExpertNames, ...] = (
    ExpertNames(("mixtral",), "block_sparse_moe.experts", NUMBERED, "mixtral.py"),
    ExpertNames(("phimoe",), "block_sparse_moe.experts", NUMBERED, "phimoe.py"),
    ExpertNames(("minimax_m2",), "block_sparse_moe.experts", NUMBERED, "minimax_m2.py"),
    ExpertNames(("lfm2_moe",), "feed_forward.experts", NUMBERED, "lfm2_moe.py"),
    ExpertNames(("granitemoe",), "block_sparse_moe.experts", SPLIT, "granitemoe.py"),
    ExpertNames(("granitemoeshared", "granitemoe_swa"), "block_sparse_moe.experts", SPLIT, "granitemoeshared.py"),
    ExpertNames(("granitemoehybrid",), "block_sparse_moe.experts", SPLIT, "granitemoehybrid.py"),
    ExpertNames(("qwen2_moe",), "mlp.experts", SPLIT, "qwen2_moe.py"),
    ExpertNames(("qwen3_moe",), "mlp.experts", SPLIT, "qwen3_moe.py"),
    ExpertNames(("qwen3_next",), "mlp.experts", SPLIT, "qwen3_next.py"),
    ExpertNames(("qwen3_5_moe", "qwen3_5_moe_text"), "mlp.experts", SPLIT, "qwen3_5.py"),
    ExpertNames(("qwen3_vl_moe",), "mlp.experts", SPLIT, "qwen3_vl_moe.py"),
    ExpertNames(("olmoe",), "mlp.experts", SPLIT, "olmoe.py"),
    ExpertNames(("deepseek_v2", "deepseek_v3"), "mlp.experts", SPLIT, "deepseek_v2.py"),
    ExpertNames(("glm4_moe",), "mlp.experts", SPLIT, "glm4_moe.py"),
    ExpertNames(("glm4_moe_lite",), "mlp.experts", SPLIT, "glm4_moe_lite.py"),
    ExpertNames(("ernie4_5_moe",), "mlp.experts", SPLIT, "ernie45_moe.py"),
    ExpertNames(("exaone_moe",), "mlp.experts", SPLIT, "exaone_moe.py"),
    ExpertNames(("afmoe",), "mlp.experts", SPLIT, "afmoe.py"),
    ExpertNames(("axk1",), "mlp.experts", SPLIT, "AXK1.py"),
    ExpertNames(("cohere2_moe",), "mlp.experts", SPLIT, "cohere2_moe.py"),
    ExpertNames(("hy_v3",), "mlp.experts", SPLIT, "hy_v3.py"),
    ExpertNames(("laguna",), "mlp.experts", SPLIT, "laguna.py"),
    ExpertNames(("longcat_flash",), "mlp.experts", SPLIT, "longcat_flash.py"),
    ExpertNames(("mimo_v2_flash",), "mlp.experts", SPLIT, "mimo_v2.py"),
    ExpertNames(("aria", "aria_text"), "mlp.experts", SPLIT, "aria.py"),
    ExpertNames(("llama4", "llama4_text"), "feed_forward.experts", SPLIT, "llama4.py"),
    ExpertNames(("jamba",), "feed_forward.experts", SPLIT, "jamba.py"),
    ExpertNames(("nemotron_h",), "mixer.experts", ("up_proj", "down_proj"), "nemotron_h.py"),
    # Of quark folders `_load_weights_quark` has branches for these alone, and passes over the experts of others; of
    # others `_load_weights_other` expects the experts in one tensor.
    ExpertNames(
        ("gpt_oss",), "mlp.experts", ("gate_up_proj", "down_proj"), "gpt_oss.py", ("fp4_e2m1", "fp8_e4m3"), False
    ),
)


def expert_names(model_type: str) -> ExpertNames | None:
    """The row of a type of models; None where vLLM's is not known."""
    return next((row for row in EXPERT_NAMES if model_type in row.model_types), None)


def unread_experts(model_type: str, layers: Iterable[str]) -> list[str]:
    """The layers of experts that vLLM is known to pass over.

    Args:
        model_type: Of config.json.
        layers: Names of layers of experts in the folder.
    """
    row = expert_names(model_type)
    return [] if row is None else [layer for layer in layers if not row.finds(layer)]
