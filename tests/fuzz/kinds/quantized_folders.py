"""Quantized folders of each format: scales, codes and quantization_config damaged, then read back."""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.bases import QUANTIZED
from tests.fuzz.bounds import folder_bound
from tests.fuzz.case import MARGIN, SOUND, Case, Place, Random, WrongError, pick
from tests.fuzz.damage import Tensor, damage_json, read_tensors, write_tensors
from tests.fuzz.oracles import architecture, folder_outputs, sqnr
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT

WIDTHS = {"F32": "<f", "F16": "<e"}
SAME_WIDTH = {
    "F32": ("I32", "U32"), "F16": ("BF16", "I16"), "BF16": ("F16", "I16"), "I8": ("U8", "F8_E4M3"),
    "U8": ("I8", "F8_E8M0"), "F8_E4M3": ("U8", "F8_E5M2"), "I32": ("U32", "F32"), "F8_E8M0": ("U8", "I8"),
}  # fmt: skip
STEPS = {
    "int8": (63, None), "uint4_wo_32": (7, 32), "mxfp4_weight_only": (3, 32), "nvfp4": (3, 16), "fp8": (15, None),
    "int8_wo": (127, None), "int4_wo_32": (7, 32),
}  # fmt: skip
"""Scheme -> positive levels, and values that share a scale, of a rounding that is no finer. 8 bits of activations with
one scale for a tensor take a bit; FP8 has 4 bits and FP4 2 for the largest values."""
LOUD = ("nan", "inf", "negative")
"""Scales that no quantizer writes."""


def _is_scale(name: str) -> bool:
    return name.endswith(("scale", "scale_2", "scales", "zero_point", "qzeros", "global_scale"))


def _bad_number(tensor: Tensor, how: str) -> bool:
    """Put a number that no scale may be in front; False for a dtype that cannot hold it."""
    values = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0}
    if tensor.dtype in WIDTHS:
        bad = struct.pack(WIDTHS[tensor.dtype], values[how])
    elif tensor.dtype == "BF16":
        bad = struct.pack("<f", values[how])[2:]
    elif tensor.dtype == "F8_E4M3" and how in ("nan", "negative"):
        bad = b"\x7f" if how == "nan" else b"\xb8"
    elif tensor.dtype == "F8_E8M0" and how == "nan":
        bad = b"\xff"
    else:
        return False
    tensor.data = bad + tensor.data[len(bad) :]
    return True


def tensors(random: Random, folder: Path) -> str:
    """One tensor dropped, renamed, of another dtype or shape, or a scale that no scale may be."""
    file = pick(random, sorted(folder.glob("*.safetensors")))
    held, metadata = read_tensors(file)
    scales = [name for name in held if _is_scale(name)]
    name = pick(random, scales if random.random() < 0.8 and scales else held)
    tensor = held[name]
    how = pick(random, ("drop", "rename", "dtype", "shape", *LOUD) if name in scales else ("drop", "dtype", "shape"))
    if how == "drop":
        del held[name]
    elif how == "rename":
        held[f"{name}_"] = held.pop(name)
    elif how == "dtype" and tensor.dtype in SAME_WIDTH:
        tensor.dtype = pick(random, SAME_WIDTH[tensor.dtype])
        how = f"as {tensor.dtype}"
    elif how == "shape":
        tensor.shape = [*tensor.shape, 1] if len(set(tensor.shape)) < 2 else tensor.shape[::-1]
        how = f"as {tensor.shape}"
    elif how in LOUD and not name.endswith(("zero_point", "qzeros")) and _bad_number(tensor, how):
        pass
    else:
        del held[name]
        how = "drop"
    write_tensors(file, held, metadata)
    return f"{name}: {how}"


def config(random: Random, folder: Path) -> str:
    """An entry of the quantization_config."""
    file = folder / "config.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    whole["quantization_config"], said = damage_json(random, whole["quantization_config"])
    file.write_text(json.dumps(whole), encoding="utf-8")
    return f"quantization_config: {said}"


def _load(folder: Path, logits: Path) -> None:
    """Read a folder and write what it computes. Raises what reading raises; WrongError for a model that cannot run."""
    import numpy as np
    import torch

    from quark.torch import import_model_from_safetensors

    model = import_model_from_safetensors(None, folder)
    ids = torch.arange(2 * 12).reshape(2, 12) * 37 % 2048
    try:
        with torch.no_grad():
            found = model.eval()(ids).logits.float().numpy()
    except Exception as error:  # noqa: BLE001 - whatever a model that was accepted breaks by
        raise WrongError(f"accepted, and cannot run: {type(error).__name__}: {str(error)[:200]}") from None
    np.save(logits, found)


def _expect(folder: Path, source: Path, scheme: str, logits: Path) -> None:
    """The same of an undamaged folder. Raises WrongError where the float model is farther than plain rounding is."""
    import numpy as np

    _load(folder, logits)
    far = sqnr(folder_outputs(source, architecture(source)), [np.load(logits)])
    least = folder_bound(source, *STEPS[scheme]) - MARGIN
    if not far >= least:
        raise WrongError(f"{folder.name} is {far:.1f} dB from the float model, where {least:.1f} are the least")


def _judge(expected: Path, found: Path) -> float:
    import numpy as np

    return sqnr([np.load(expected)], [np.load(found)])


def make(random: Random, place: Place) -> Case:
    base = pick(random, QUANTIZED)
    folder = place.bases.copy(base, place.inputs / "quantized")
    damage = None if random.random() < SOUND else pick(random, (tensors, tensors, tensors, config))
    said, sound = damage(random, folder) if damage else "undamaged", damage is None
    if random.random() < 0.2:
        arguments: tuple[Any, ...] = (
            "evaluate", place.bases.get("llama"), folder, "--text", TEXT / "heldout.txt", "--length", 16,
            "--windows", 1,
        )  # fmt: skip
        return Case(f"{base}: {said}: {shown(*arguments)}", partial(quark, *arguments), sound=sound)
    found = place.outputs / "logits.npy"
    expecting = partial(_expect, place.bases.get(base), place.bases.get("llama"), QUANTIZED[base][0])
    expected = place.bases.made(f"{base}.npy", expecting)
    return Case(
        f"{base}: {said}: import_model_from_safetensors(None, {str(folder)!r})",
        partial(_load, folder, found),
        partial(_judge, expected, found),
        (found,),
        # Of the loaded folder itself: no rounding comes in. What a config says may be another sound format.
        margin=None if damage is config else -40.0,
        sound=sound,
    )
