"""GGUF files: numbers of the metadata, entries of tensors, bytes, and values; read alone and beside the float model."""

from __future__ import annotations

import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes
from tests.fuzz.oracles import sqnr

NUMBERS = (0, 1, 2, 3, 7, 1000, 10**6, 2**31 - 1, 2**32 - 1)
SIZES = (0, 1, 31, 32, 2**31, 2**40, 2**63, 2**64 - 1)
STEPS = (1, 4, 32, 64, 2**63, 2**64 - 32)
LIKENESS = 40.0
"""dB at which two sets of logits are those of one model: rounding of float32 leaves over 100."""


def make_base(file: Path, source: Path) -> None:
    """The llama in 4 bits, with its tokenizer."""
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer, export_gguf

    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config("int4_wo_32"))
    model = quantizer.freeze(quantizer.quantize_model(AutoModelForCausalLM.from_pretrained(source)))
    export_gguf(model, file.parent, file.stem, source)


def metadata(random: Random, data: bytearray, reader: Any) -> tuple[str, bool]:
    """A number of the metadata."""
    fields = [
        field for field in reader.fields.values() if len(field.types) == 1 and field.parts[-1].dtype.kind in "uif"
    ]
    field = pick(random, [field for field in fields if not field.name.startswith("GGUF.")])
    part = field.parts[-1]
    start = field.offset + 8 + int(field.parts[0][0]) + 4
    value = pick(random, (*NUMBERS, float("nan"), -1.0, 0.5) if part.dtype.kind == "f" else NUMBERS)
    form = {"f": "<f", "u": f"<{'BHxIxxxQ'[part.itemsize - 1]}", "i": f"<{'bhxixxxq'[part.itemsize - 1]}"}
    number = float(value) if part.dtype.kind == "f" else int(value) % (1 << 8 * part.itemsize - 1)
    data[start : start + part.itemsize] = struct.pack(form[part.dtype.kind], number)
    computes = field.name.startswith("llama.") and "context_length" not in field.name
    return f"{field.name} = {value}", not computes


def entry(random: Random, data: bytearray, reader: Any) -> tuple[str, bool]:
    """A size, the type or the place of a tensor."""
    tensor, other = pick(random, reader.tensors), pick(random, reader.tensors)
    part = pick(random, (3, 4, 5, 5))
    parts = tensor.field.parts
    start = tensor.field.offset + sum(int(each.nbytes) for each in parts[:part])
    width = parts[part].itemsize
    if part == 3:
        index = int(random.integers(len(parts[3])))
        start, value = start + 8 * index, pick(random, SIZES)
    elif part == 4:
        value = int(random.integers(40))
    else:
        place = int(parts[5][0])
        value = pick(random, (*(place + step for step in STEPS), int(other.field.parts[5][0]))) % 2**64
    said = f"{tensor.name}: {('sizes', 'type', 'offset')[part - 3]} = {value}"
    if data[start : start + width] == int(value).to_bytes(width, "little"):
        return f"{said}, as it is", False
    data[start : start + width] = int(value).to_bytes(width, "little")
    return said, False


def values(random: Random, data: bytearray, reader: Any) -> tuple[str, bool]:
    """NaN over values and scales: only where it lies in codes may it be taken."""
    tensor = pick(random, reader.tensors)
    data[tensor.data_offset : tensor.data_offset + 8] = b"\xff\x7f\xff\x7f\xff\x7f\xff\x7f"
    return f"{tensor.name}: NaN", False


def some_bytes(random: Random, data: bytearray, reader: Any) -> tuple[str, bool]:
    head = int(reader.tensors[0].data_offset)
    changed, said = damage_bytes(random, bytes(data[:head]))
    data[:head] = changed
    return said, True  # a letter of a token is as good as another


DAMAGES = (metadata, entry, entry, values, some_bytes)


def _read(file: Path, source: Path | None, logits: Path) -> None:
    """Write what the file computes: beside the float model in a folder, or alone."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from quark.torch import import_model_from_gguf
    from quark.torch.writers.gguf.model_of_file import model_of_gguf

    if source is None:
        with tempfile.TemporaryDirectory() as folder:
            model = model_of_gguf(file, Path(folder) / "companions")
    else:
        model = import_model_from_gguf(AutoModelForCausalLM.from_pretrained(source), file)
    ids = torch.arange(2 * 12).reshape(2, 12) * 37 % 2048
    with torch.no_grad():
        np.save(logits, model.eval()(ids).logits.float().numpy())


def _read_by_others(file: Path, logits: Path) -> None:
    """The same of the undamaged file by transformers, which decodes by the package gguf."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ids = torch.arange(2 * 12).reshape(2, 12) * 37 % 2048
    with torch.no_grad():
        np.save(logits, model.eval()(ids).logits.numpy())


def _judge(expected: Path, found: Path) -> float:
    import numpy as np

    return sqnr([np.load(expected)], [np.load(found)])


def make(random: Random, place: Place) -> Case:
    import gguf

    source = place.bases.get("llama")
    base = place.bases.made("llama.gguf", partial(make_base, source=source))
    file = place.inputs / "model.gguf"
    data, said, any_value = bytearray(base.read_bytes()), "undamaged", False
    alone = random.random() < 0.5
    sound, how = random.random() < SOUND, None
    if not sound:
        how = pick(random, DAMAGES)
        said, any_value = how(random, data, gguf.GGUFReader(base))
    file.write_bytes(data)
    found = place.outputs / "logits.npy"
    expected = place.bases.made("gguf.npy", partial(_read_by_others, base))
    return Case(
        f"{'alone' if alone else 'beside the model'}: {said}",
        partial(_read, file, None if alone else source, found),
        partial(_judge, expected, found),
        (found,),
        # What a file says of itself, alone, is as it is.
        margin=None if any_value or (alone and how is metadata) else -LIKENESS,
        sound=sound,
    )
