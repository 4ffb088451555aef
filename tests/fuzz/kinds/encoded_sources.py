"""Folders in codes of other programs, read tensor by tensor and quantized anew: headers, scales and configs damaged.

What a folder stands for, damaged or not, is decoded by torch and NumPy; the result has to be as near to that as plain
rounding is.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from tests.fuzz.bounds import folder_bound
from tests.fuzz.case import SOUND, Case, Place, Random, WrongError, pick
from tests.fuzz.encoded import ENCODINGS, decode_folder
from tests.fuzz.kinds.quantized_folders import config, tensors
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown

WAYS: tuple[tuple[object, ...], ...] = ((), ("--stream",), ("--export-format", "compressed-tensors"))
"""The last is not for GPT-OSS, whose experts transformers would not find in such a folder."""


def _judge(source: Path, result: Path, name: str) -> float:
    """SQNR of a result against what the source stands for. Raises WrongError where that is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            decoded = decode_folder(source, Path(folder) / "decoded", name)
        except Exception as error:  # noqa: BLE001 - of torch, of NumPy, or of a check
            raise WrongError(f"accepted, and stands for nothing: {type(error).__name__}: {error}") from None
        return judge_folder(decoded, result)


def _bound(source: Path, name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return folder_bound(decode_folder(source, Path(folder) / "decoded", name))


def make(random: Random, place: Place) -> Case:
    base = pick(random, ENCODINGS)
    source, output = place.bases.copy(base, place.inputs / "encoded"), place.outputs / "result"
    damage = None if random.random() < SOUND else pick(random, (tensors, tensors, tensors, config))
    said = damage(random, source) if damage else "undamaged"
    command = (
        "quantize",
        source,
        "--scheme",
        "int8_wo",
        "-o",
        output,
        *pick(random, WAYS[:2] if ENCODINGS[base].base == "gpt_oss" else WAYS),
    )
    return Case(
        f"{base}: {said}: {shown(*command)}",
        partial(quark, *command),
        partial(_judge, source, output, base),
        (output,),
        like=base,
        bound=partial(_bound, place.bases.get(base), base),
        sound=damage is None,
    )
