"""Fused layers: what vLLM makes one matrix of, one row for each set of layers that its source names.

A matrix has one scheme: vLLM refuses a folder that gives its parts different ones ("requires all to use the same
scheme"). And where a scheme has a scale for a whole weight (NVFP4), the matrix has one of them, the largest of its
parts, under which the codes of the others decode to something else. SGLang has copies of the same loaders, and fuses
the same layers. A mixture of experts has one scheme, too ("All MoE projections need to have same quantization scheme").

Read from the source of vLLM 0.33, from `packed_modules_mapping`, `stacked_params_mapping` and `orig_to_new_stacked` of
its models; paths are of model_executor/models, or of vllm/models where they begin with a slash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FusedLayers:
    """One row.

    Attributes:
        fused: What the one matrix is called in vLLM; empty: layers that read one tensor, and are kept apart there.
        members: Last names of the layers in the model of transformers, with that of their module before it where it
            counts (`encoder_attn.k_proj`). Two of them are enough, as one may be missing: a value that is the key.
        source: Files of vLLM that say so, or some of them.
        whole: Whether all members have to be there.
        only, but: Architectures, as config.json names them: the row is for these only, or for all but these.
    """

    fused: str
    members: tuple[str, ...]
    source: str
    whole: bool = False
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def is_of(self, architectures: Collection[str]) -> bool:
        """Whether the row holds for a model of these architectures."""
        return not set(self.but).intersection(architectures) and (
            not self.only or not set(self.only).isdisjoint(architectures)
        )

    def among(self, module: str, leaves: Collection[str]) -> list[str]:
        """Those of the layers of a module, by their last names, that are members; none where the row does not match.

        Args:
            module: Last name of the module.
            leaves: Last names of its linear layers.
        """
        found = []
        for member in self.members:
            place, _, leaf = member.rpartition(".")
            if leaf in leaves and place in ("", module):
                found.append(leaf)
        return found if len(found) >= (len(self.members) if self.whole else 2) else []


FUSED_LAYERS: tuple[FusedLayers, ...] = (
    # What is more exact comes first: a layer belongs to the first row that matches.
    FusedLayers("kv_proj", ("encoder_attn.k_proj", "encoder_attn.v_proj"), "whisper.py cohere_asr.py fireredasr2.py"),
    FusedLayers(
        "in_proj_qkvg", tuple(f"linear_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "g_proj")),
        "olmo_hybrid.py", whole=True,
    ),
    FusedLayers(
        "in_proj_qkvgfab", ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"), "alice_ai.py /kimi_k3", whole=True,
    ),
    FusedLayers(
        "qkvb_proj", ("q_proj", "k_proj", "v_proj", "b_proj"), "bailing_moe_v3.py", whole=True,
        only=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
    ),
    FusedLayers(
        "qkvg_proj", ("q_proj", "k_proj", "v_proj", "g_proj"), "/step5", whole=True,
        only=("Step5ForCausalLM", "Step5ForConditionalGeneration"),
    ),
    FusedLayers(
        "qkv_gate_proj", ("q_proj", "k_proj", "v_proj", "gate_proj"), "/beam, which calls it output_gate_proj",
        whole=True, only=("BeamForCausalLM",),
    ),
    FusedLayers("qkv_proj", ("q_proj", "k_proj", "v_proj"), "llama.py qwen3.py opt.py mixtral.py and 150 others"),
    FusedLayers("qkv_proj", ("query", "key", "value"), "bert.py roberta.py telechat2.py"),
    FusedLayers("attn.qkv", ("attn.q", "attn.k", "attn.v"), "qwen2_5_vl.py qwen2_5_omni_thinker.py"),
    FusedLayers("merged_qkv", ("wq", "wk", "wv"), "molmo2.py"),
    FusedLayers("qkvr", ("wq_du", "wk_dv", "wv_dv", "wr_du"), "/inkling"),
    FusedLayers(
        "fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"),
        "deepseek_v2.py glm4_moe_lite.py longcat_flash.py openpangu.py mistral_large_3.py /deepseek_v32 /kimi_k3 "
        "transformers/fusers/mla.py",
        but=("MiniCPM3ForCausalLM", "SarvamMLAForCausalLM"),
    ),
    FusedLayers("fused_wqa_wkv", ("wq_a", "wkv"), "/deepseek_v4"),
    FusedLayers("fused_wkv_wgate", ("compressor.wkv", "compressor.wgate"), "/deepseek_v4"),
    FusedLayers("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), "qwen3_5.py minicpmv4_6.py /qwen4_exp"),
    FusedLayers("in_proj_ba", ("in_proj_b", "in_proj_a"), "qwen3_5.py minicpmv4_6.py /qwen4_exp"),
    FusedLayers("gate_up_proj", ("gate_proj", "up_proj"), "llama.py qwen3.py deepseek_v2.py and 120 others"),
    FusedLayers("w13", ("w1", "w3"), "lfm2.py internlm2.py /inkling /deepseek_v4"),
    FusedLayers("gate_up_proj", ("c_fc_0", "c_fc_1"), "exaone.py"),
    FusedLayers("fc13", ("fc1", "fc3"), "dots_ocr.py"),
    FusedLayers("merged_proj", ("gate_proj", "dense_h_to_4h"), "glm4v.py"),
    # Kept apart, though they read one tensor.
    FusedLayers("", ("in_proj_qkvz", "in_proj_ba"), "qwen3_next.py"),
    FusedLayers("", ("q_proj", "kv_a_proj_with_mqa"), "deepseek_v2.py, where there is no q_lora_rank"),
    FusedLayers("", ("q_a_proj", "kv_a_proj_with_mqa"), "minicpm3.py sarvam.py"),
    FusedLayers("", ("wk", "weights_proj"), "deepseek_v2.py /deepseek_v32 /hy_v4: one matrix that stays in float"),
)  # fmt: skip


def fused_siblings(
    module: str, leaves: Sequence[str], architectures: Iterable[str]
) -> list[tuple[FusedLayers, list[str]]] | None:
    """The rows that match the linear layers of one module, each with its members; None where none does.

    Args:
        module: Last name of the module.
        leaves: Last names of its linear layers.
        architectures: Of the model.

    Returns:
        Every layer in one row at most; layers in none are no part of a fused matrix.
    """
    known, free, found = set(architectures), list(leaves), []
    for row in FUSED_LAYERS:
        members = row.among(module, free) if row.is_of(known) else []
        if members:
            found.append((row, members))
            free = [leaf for leaf in free if leaf not in members]
    return found or None
