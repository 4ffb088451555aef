"""GGUF files that were damaged, or contradict themselves or a model: refused as llama.cpp refuses them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quark.core.blocks.block_types import BLOCK_TYPES
from quark.errors import FormatError, NonFiniteError
from quark.gguf.block_bytes import halves_of
from quark.gguf.reader import open_gguf
from quark.torch import import_model_from_gguf
from quark.torch.writers.gguf.model_of_file import model_of_gguf
from tests.commands.program import quark
from tests.models.gguf_rows import PLAIN, YARN, build, write_gguf
from tests.models.torch_zoo import LANGUAGE_MODEL

F32 = torch.float32
IDS = torch.arange(3, 19).reshape(1, 16)


def llama(**options: Any) -> Any:
    return build("llama", F32, attention_bias=False, **options)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a llama in float32."""
    file = tmp_path_factory.mktemp("sound") / "m.gguf"
    write_gguf(llama(), file, LANGUAGE_MODEL)
    return file


class Copy:
    """The bytes of a file, and where its fields lie."""

    def __init__(self, file: Path) -> None:
        self.data, self.reader = bytearray(file.read_bytes()), gguf.GGUFReader(file)

    def tensor(self, name: str) -> Any:
        return next(tensor for tensor in self.reader.tensors if tensor.name == name)

    def put(self, name: str, part: int, value: int, index: int = 0) -> None:
        """A number of a tensor's entry: its sizes (3), type (4) or offset (5)."""
        parts = self.tensor(name).field.parts
        start = self.tensor(name).field.offset + sum(int(p.nbytes) for p in parts[:part])
        size = parts[part].itemsize
        self.data[start + index * size : start + (index + 1) * size] = value.to_bytes(size, "little")

    def offset(self, name: str) -> int:
        return int(self.tensor(name).field.parts[5][0])

    def set(self, key: str, form: str, value: float) -> None:
        """A number of the metadata."""
        field = self.reader.get_field(key)
        start = field.offset + 8 + len(key) + 4
        self.data[start : start + struct.calcsize(form)] = struct.pack(form, value)


UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"


def swapped(copy: Copy) -> None:
    one, other = copy.offset(UP), copy.offset(DOWN)
    copy.put(UP, 5, other)
    copy.put(DOWN, 5, one)


def token(copy: Copy) -> None:
    at = copy.data.index(b"the", 200)
    copy.data[at] = 0xFF


DAMAGES: dict[str, tuple[Callable[[Copy], None], str]] = {
    "each other's data": (swapped, "not after the last at"),
    "another's data": (lambda copy: copy.put(UP, 5, copy.offset(DOWN)), "not after the last at"),
    "offset + 1": (lambda copy: copy.put(UP, 5, copy.offset(UP) + 1), "not after the last at"),
    "offset + 32": (lambda copy: copy.put(UP, 5, copy.offset(UP) + 32), "not after the last at"),
    "offset 2 ** 64": (lambda copy: copy.put(UP, 5, 2**64 - 32), "not after the last at"),
    "another type": (lambda copy: copy.put(UP, 4, 1), "not after the last at"),
    "a size of 2 ** 63": (lambda copy: copy.put(UP, 3, 2**63), "not after the last|ends at byte|damaged"),
    "one block": (lambda copy: copy.set("llama.block_count", "<I", 1), "block 1 are there"),
    "a million blocks": (lambda copy: copy.set("llama.block_count", "<I", 10**6), "block 2 are missing"),
    "a base of 0": (lambda copy: copy.set("llama.rope.freq_base", "<f", 0.0), "base of rotations"),
    "an epsilon of NaN": (
        lambda copy: copy.set("llama.attention.layer_norm_rms_epsilon", "<f", float("nan")), "epsilon is nan"
    ),
    "a token that is no UTF-8": (token, "no UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_what_llama_cpp_refuses_is_refused_when_the_file_is_opened(name: str, sound: Path, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    copy, file = Copy(sound), tmp_path / "m.gguf"
    change(copy)
    file.write_bytes(copy.data)
    with pytest.raises(FormatError, match=message):
        open_gguf(file)
    done = quark("inspect", file)
    assert done.code == 1 and "damaged" in done.err, done.err


def contradicts(copy: Copy, file: Path, message: str) -> None:
    """The file alone, and beside the float model."""
    file.write_bytes(copy.data)
    for read in (
        lambda: import_model_from_gguf(llama(), file),
        lambda: model_of_gguf(file, file.parent / "companions"),
    ):
        with pytest.raises((FormatError, NonFiniteError), match=message):
            read()


@pytest.mark.slow
def test_heads_that_the_tensors_do_not_have_are_refused_before_a_model_of_them_is_made(
    sound: Path, tmp_path: Path
) -> None:
    """A million heads were 4 GB."""
    copy = Copy(sound)
    copy.set("llama.attention.head_count_kv", "<I", 10**6)
    contradicts(copy, tmp_path / "m.gguf", "head_count_kv|has the shape")


def test_values_that_are_no_numbers_are_refused(sound: Path, tmp_path: Path) -> None:
    copy = Copy(sound)
    start = copy.tensor(UP).data_offset
    copy.data[start : start + 4] = struct.pack("<f", float("nan"))
    contradicts(copy, tmp_path / "m.gguf", rf"{UP} of the file, .* has NaN or infinite values")


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_the_scales_of_blocks_lie_where_gguf_reads_them(name: str) -> None:
    """A float16 NaN in its place makes the values NaN, and only in its place can it be seen."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    starts = halves_of(BLOCK_TYPES[name])
    for start in range(size - 1):
        block = np.zeros(size, np.uint8)
        block[start : start + 2] = (0xFF, 0x7F)
        values = gguf.quants.dequantize(block.reshape(1, -1), kind)
        assert (start in starts) <= bool(np.isnan(values).any()), start


def rewritten(file: Path, sound: Path, change: Callable[[str, Any], Any], **more: Any) -> Path:
    """A file whose tensors are others: of another shape, or type."""
    reader = gguf.GGUFReader(sound)
    writer = gguf.GGUFWriter(file, "llama")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kinds = field.types
            value = more.get(key, field.contents())
            writer.add_key_value(key, value, kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)
    for key, value in more.items():
        if key not in reader.fields:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for tensor in reader.tensors:
        made = change(tensor.name, tensor.data)
        if isinstance(made, tuple):
            writer.add_tensor(tensor.name, made[0], raw_dtype=made[1])
        elif made is not None:
            writer.add_tensor(tensor.name, made)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


SHAPES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda data: np.ascontiguousarray(data.T),
    "of three axes": lambda data: data.reshape(2, -1, data.shape[1]),
    "shorter": lambda data: data[:-1],
    "a vector": lambda data: data.reshape(-1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_of_another_shape_are_refused(name: str, sound: Path, tmp_path: Path) -> None:
    file = rewritten(tmp_path / "m.gguf", sound, lambda tensor, data: SHAPES[name](data) if tensor == UP else data)
    model = llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(FormatError, match=f"{UP} has the shape"):
        import_model_from_gguf(model, file)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_norm_in_blocks_is_refused(sound: Path, tmp_path: Path) -> None:
    """Its bytes would be taken for its values."""
    kind = gguf.GGMLQuantizationType.Q8_0
    file = rewritten(
        tmp_path / "m.gguf", sound,
        lambda name, data: (gguf.quants.quantize(data, kind), kind) if name == "output_norm.weight" else data,
    )  # fmt: skip
    with pytest.raises(FormatError, match=r"output_norm\.weight has the type Q8_0"):
        import_model_from_gguf(llama(), file)


OTHERS = {
    "rope.freq_base": {"rope_parameters": PLAIN | {"rope_theta": 777.0}},
    "attention.layer_norm_rms_epsilon": {"rms_norm_eps": 0.3},
    "rope.scaling.type": {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 4.0}},
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_float_model_with_other_hyperparameters_is_refused(key: str, sound: Path) -> None:
    with pytest.raises(FormatError, match=rf"llama\.{key} is .* in the file, and .* config of the model"):
        import_model_from_gguf(llama(**OTHERS[key]), sound)


def test_a_key_that_changes_what_is_computed_and_is_not_known_is_refused(sound: Path, tmp_path: Path) -> None:
    for value, refused in ((0.5, True), (1.0, False)):
        file = rewritten(tmp_path / f"{value}.gguf", sound, lambda name, data: data, **{"llama.logit_scale": value})
        if refused:
            with pytest.raises(FormatError, match=r"llama\.logit_scale is 0\.5 in the file, and not there"):
                import_model_from_gguf(llama(), file)
        else:
            import_model_from_gguf(llama(), file)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_rotations_of_a_file_alone_are_kept(kind: str, tmp_path: Path) -> None:
    """transformers leaves them out of the config that it makes of a file."""
    rope = YARN if kind == "yarn" else PLAIN | {"rope_type": "linear", "factor": 4.0}
    model = llama(rope_parameters=rope)
    write_gguf(model, tmp_path / "m.gguf", LANGUAGE_MODEL)
    read = model_of_gguf(tmp_path / "m.gguf", tmp_path / "companions")
    assert read.config.rope_parameters["rope_type"] == kind
    with torch.no_grad():
        torch.testing.assert_close(read(IDS).logits.float(), model(IDS).logits, rtol=1e-4, atol=1e-4)
