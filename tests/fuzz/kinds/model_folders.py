"""Model folders: config.json, index, tensors and files damaged; quantized, streamed, planned and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.bases import FOLDERS
from tests.fuzz.bounds import folder_bound
from tests.fuzz.case import SOUND, Case, Place, Random, nothing_to_compare, pick
from tests.fuzz.damage import (
    damage_bytes,
    damage_json,
    hostile_pickle,
    odd_file,
    odd_values,
    read_tensors,
    shorten,
    write_tensors,
)
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown

Damage = Callable[[Random, Path, Path], str]
"""Of a folder; the third is the marker that hostile content writes."""

MODEL_TYPES = ("llama", "mistral", "qwen2", "gpt2", "bert", "t5", "vit", "mixtral", "whisper", "nothing", "")
ARCHITECTURES = (
    "LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", "BertForMaskedLM", "BertModel",
    "GPT2LMHeadModel", "ViTModel", "T5ForConditionalGeneration", "T5EncoderModel", "Nothing", "AutoModel",
    "torch.nn.Linear", "os",
)  # fmt: skip


def change_json(folder: Path, change: Callable[[Any], tuple[Any, str]], name: str = "config.json") -> str:
    file = folder / name
    changed, said = change(json.loads(file.read_text(encoding="utf-8")))
    file.write_text(json.dumps(changed), encoding="utf-8")
    return f"{name}: {said}"


def any_config(random: Random, folder: Path, marker: Path) -> str:
    return change_json(folder, partial(damage_json, random))


def a_size(random: Random, folder: Path, marker: Path) -> str:
    def change(config: Any) -> tuple[Any, str]:
        sizes = [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
        name = pick(random, sizes)
        config[name] = pick(random, (0, -1, 1, 3, config[name] * 2, config[name] + 1, 10**5, 10**9, 2**63, "64", 64.0))
        return config, f"{name} = {config[name]!r}"

    return change_json(folder, change)


def another_class(random: Random, folder: Path, marker: Path) -> str:
    def change(config: Any) -> tuple[Any, str]:
        name = pick(random, ("model_type", "architectures"))
        config[name] = pick(random, MODEL_TYPES) if name == "model_type" else [pick(random, ARCHITECTURES)]
        return config, f"{name} = {config[name]!r}"

    return change_json(folder, change)


def code_of_its_own(random: Random, folder: Path, marker: Path) -> str:
    """`auto_map`: classes in a file of the folder."""
    (folder / "hostile.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Hostile: pass\n")

    def change(config: Any) -> tuple[Any, str]:
        names = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
        config["auto_map"] = dict.fromkeys(names, "hostile.Hostile")
        if random.random() < 0.5:
            config["model_type"] = "hostile"
        return config, "auto_map names hostile.py"

    return change_json(folder, change)


def a_field_of_meaning(random: Random, folder: Path, marker: Path) -> str:
    names = ("quantization_config", "dtype", "torch_dtype", "rope_scaling", "rope_parameters", "tie_word_embeddings",
             "hidden_act", "pad_token_id", "attn_implementation", "text_config", "sub_configs", "id2label")  # fmt: skip
    values = [*odd_values(), {"quant_method": "gptq"}, {"quant_method": "bitsandbytes", "load_in_4bit": True},
              {"quant_method": "quark"}, {"quant_method": "fp8"}, {"rope_type": "yarn"}, "bfloat16"]  # fmt: skip

    def change(config: Any) -> tuple[Any, str]:
        name = pick(random, names)
        config[name] = pick(random, values)
        return config, f"{name} = {shorten(config[name])}"

    return change_json(folder, change)


def the_index(random: Random, folder: Path, marker: Path) -> str:
    name = "model.safetensors.index.json"
    if not (folder / name).exists():
        return any_config(random, folder, marker)
    if random.random() < 0.5:
        return change_json(folder, partial(damage_json, random), name)

    def change(index: Any) -> tuple[Any, str]:
        tensor = pick(random, index["weight_map"])
        files = sorted({*index["weight_map"].values()})
        index["weight_map"][tensor] = pick(random, [*files, "../other.safetensors", "/etc/hostname", "nothing", ""])
        return index, f"{tensor} in {index['weight_map'][tensor]!r}"

    return change_json(folder, change, name)


def tensors(random: Random, folder: Path, marker: Path) -> str:
    """One tensor dropped, doubled, renamed, of another dtype or shape, with values that are no numbers."""
    file = pick(random, sorted(folder.glob("*.safetensors")))
    held, metadata = read_tensors(file)
    name = pick(random, held)
    tensor = held[name]
    how = pick(random, ("drop", "double", "rename", "dtype", "shape", "nan", "extra"))
    if how == "drop":
        del held[name]
    elif how == "double":
        held[f"{name}.copy"] = tensor
    elif how == "rename":
        held[name.replace("weight", "wait") if "weight" in name else f"x.{name}"] = held.pop(name)
    elif how == "dtype":
        tensor.dtype = pick(random, [d for d in ("I32", "U32", "F32") if d != tensor.dtype])
    elif how == "shape":
        tensor.shape = [*tensor.shape[::-1], 1] if len(set(tensor.shape)) < 2 else tensor.shape[::-1]
    elif how == "nan":
        tensor.data = bytes.fromhex("0000c07f") + tensor.data[4:]
    elif how == "extra":
        held["model.layers.7.self_attn.q_proj.weight"] = tensor
    write_tensors(file, held, metadata)
    return f"{file.name}: {how} {name}"


def weight_bytes(random: Random, folder: Path, marker: Path) -> str:
    file = pick(random, sorted(folder.glob("*.safetensors")))
    data = file.read_bytes()
    file.write_bytes(data[: int(random.integers(len(data)))])
    return f"{file.name} is cut off"


def files(random: Random, folder: Path, marker: Path) -> str:
    return odd_file(random, pick(random, sorted(path for path in folder.iterdir() if path.is_file())))


def text_bytes(random: Random, folder: Path, marker: Path) -> str:
    file = pick(random, sorted(folder.glob("*.json")))
    changed, said = damage_bytes(random, file.read_bytes())
    file.write_bytes(changed)
    return f"{file.name}: {said}"


def a_pickle(random: Random, folder: Path, marker: Path) -> str:
    if random.random() < 0.5:
        for file in folder.glob("*.safetensors*"):
            file.unlink()
    (folder / "pytorch_model.bin").write_bytes(hostile_pickle(marker))
    return "a pickle that runs a command"


DAMAGES: tuple[Damage, ...] = (
    any_config, any_config, a_size, another_class, code_of_its_own, a_field_of_meaning, the_index, tensors, tensors,
    weight_bytes, files, text_bytes, a_pickle,
)  # fmt: skip
WITHOUT_RESULT = ("plan", "inspect")
WAYS = ("memory", "memory", "--stream", "file to file", *WITHOUT_RESULT)


def _file_to_file(source: Path, output: Path) -> None:
    from quark.torch import LLMTemplate, ModelQuantizer

    ModelQuantizer(LLMTemplate.get("auto").get_config("int8_wo")).direct_quantize_checkpoint(str(source), str(output))


def folder_case(place: Place, base: str, way: str, damage: Callable[[Path, Path], str] | None) -> Case:
    """A base, damaged or not, that goes one of WAYS; transformers says of the result whether it is right."""
    source = place.bases.copy(base, place.inputs / "model")
    said = damage(source, place.marker) if damage else "undamaged"
    output = place.outputs / "result"
    command: tuple[object, ...] = ("quantize", source, "--scheme", "int8_wo", "-o", output)
    if way == "--stream":
        command = (*command, way)
    elif way in WITHOUT_RESULT:
        command = (way, source, *(("--scheme", "int8_wo") if way == "plan" else ()))
    work, typed = partial(quark, *command), shown(*command)
    if way == "file to file":
        work, typed = partial(_file_to_file, source, output), f"direct_quantize_checkpoint({str(source)!r})"
    return Case(
        f"{base}: {said}: {typed}",
        work,
        partial(judge_folder, source, output) if way not in WITHOUT_RESULT else nothing_to_compare,
        (output,),
        like=base,
        bound=partial(folder_bound, place.bases.get(base)),
        sound=damage is None,
    )


def make(random: Random, place: Place) -> Case:
    base = pick(random, ("llama", "llama", *FOLDERS))
    way = pick(random, WAYS)
    return folder_case(place, base, way, None if random.random() < SOUND else partial(pick(random, DAMAGES), random))
