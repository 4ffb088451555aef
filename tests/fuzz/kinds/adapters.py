"""Adapters: fields of adapter_config.json, patterns without an end, tensors, files. PEFT says what they stand for."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.bounds import folder_bound
from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, nothing_to_compare, pick
from tests.fuzz.damage import damage_json
from tests.fuzz.kinds.model_folders import change_json, files, tensors, text_bytes, weight_bytes
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown

CONFIG = "adapter_config.json"
FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("XLORA", "LOHA", "PROMPT_TUNING", "ADALORA", "IA3", None),
    "base_model_name_or_path": ("owner/name", "../../llama", "https://example.com/x", "/etc", ""),
    "r": (0, -1, 3, 8, 2**40, "4"), "lora_alpha": (0, -4, 1e30, "x"),
    "use_dora": (True,), "use_rslora": (True,), "fan_in_fan_out": (True,), "bias": ("all", "lora_only", "x"),
    "revision": ("main",), "adapters": ({"0": "owner/name"},), "megatron_config": ({"a": 1},),
    "modules_to_save": (["lm_head"], ["nothing"]), "layers_to_transform": ([0], [7], "x"),
    "target_modules": (["q_proj", "nothing"], ["v_proj"], "all-linear", []),
    "auto_mapping": ({"base_model_class": "os"},),
    "trainable_token_indices": ([0, 1], [99999999]), "loftq_config": ({"x": 1},), "corda_config": ({"x": 1},),
}  # fmt: skip
PATTERN = "((a|a|o|d|e|l|[.])*)*(.*)*#"


def make_base(folder: Path, source: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(source), config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name:
                x.normal_(0, 0.3)
    model.save_pretrained(folder)


def any_field(random: Random, folder: Path, marker: Path) -> str:
    return change_json(folder, partial(damage_json, random), CONFIG)


def field(random: Random, folder: Path, marker: Path) -> str:
    name = pick(random, FIELDS)
    value = pick(random, FIELDS[name])
    return change_json(folder, lambda said: ({**said, name: value}, f"{name} = {value!r}"), CONFIG)


def pattern(random: Random, folder: Path, marker: Path) -> str:
    name = pick(random, ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"))
    value = {PATTERN: 4} if name in ("rank_pattern", "alpha_pattern") else PATTERN
    return change_json(folder, lambda said: ({**said, name: value}, f"{name} = {value!r}"), CONFIG)


DAMAGES = (any_field, any_field, field, field, pattern, tensors, tensors, weight_bytes, files, text_bytes)


def merged(folder: Path, base: Path, made: Path) -> Path:
    """The float folder that PEFT makes of an adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(model, folder, local_files_only=True).merge_and_unload().save_pretrained(made)
    return made


def _judge(folder: Path, base: Path, result: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            made = merged(folder, base, Path(scratch) / "merged")
        except Exception as error:  # noqa: BLE001 - whatever PEFT refuses by
            raise WrongError(f"accepted, and PEFT refuses: {type(error).__name__}: {str(error)[:200]}") from None
        return judge_folder(made, result)


def _bound(folder: Path, base: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        return folder_bound(merged(folder, base, Path(scratch) / "merged"))


def make(random: Random, place: Place) -> Case:
    base = place.bases.get("llama")
    made = place.bases.made("adapter", partial(make_base, source=base))
    source, output = Path(shutil.copytree(made, place.inputs / "adapter")), place.outputs / "result"
    damage = None if random.random() < SOUND else pick(random, DAMAGES)
    said = damage(random, source, place.marker) if damage else "undamaged"
    command = ("quantize", source, "--scheme", "int8_wo", "-o", output)
    return Case(
        f"{said}: {shown(*command)}",
        partial(quark, *command),
        # PEFT itself would not end on such a pattern.
        nothing_to_compare if damage is pattern else partial(_judge, source, base, output),
        (output,),
        like="adapter",
        bound=partial(_bound, made, base),
        sound=damage is None,
    )
