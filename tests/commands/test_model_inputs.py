"""Calibration data by what a model takes: what each kind becomes, and what is refused by name."""

from __future__ import annotations

import copy
import shutil
import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quark.base.data_files.images import open_image
from quark.errors import CalibrationError, ConfigError, FormatError
from quark.jobs.folders.model_inputs import ModelInputs
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.model.model_folder import model_class
from tests.models.model_folders import DATA, model_folder
from tests.models.torch_zoo import TEXT
from tests.models.versions import IMAGES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("folders")
    return {name: model_folder(name, base / name) for name in ("qwen3", "classifier", "t5", "vit", "clip", "whisper")}


def inputs(folder: Path, dtype: torch.dtype = torch.float32) -> ModelInputs:
    config = OpenedFolder(folder).of_transformers
    return ModelInputs(folder, config, model_class(folder, config), dtype)


def shapes(batch: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in batch.items()}


def test_text_is_windows_for_a_language_model_and_lines_for_others(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("A first line of words.\n\n  and a second one, which is longer than the first  \n" * 20)
    windows = inputs(folders["qwen3"]).read(file, 3, 16)
    assert [tuple(window.shape) for window in windows] == [(1, 16)] * 3
    everything = inputs(folders["qwen3"]).read(file, 10**6, 16)
    assert len(inputs(folders["qwen3"]).read(file, 10**30, 16)) == len(everything), (
        "a limit that no machine can count to"
    )
    lines = inputs(folders["classifier"]).read(file, 100, 8)
    assert len(lines) == 40 and all(line["input_ids"].shape[1] <= 8 for line in lines)
    assert set(lines[0]) == {"input_ids", "attention_mask"}
    pair = inputs(folders["t5"]).read(file, 1, 64)[0]
    assert pair["decoder_input_ids"].shape == pair["input_ids"].shape
    assert pair["decoder_input_ids"][0, 0] == 0
    assert torch.equal(pair["decoder_input_ids"][:, 1:], pair["input_ids"][:, :-1])


@IMAGES
def test_samples_are_the_first_ones_or_chosen_by_a_seed(folders: dict[str, Path], tmp_path: Path) -> None:
    images, made = DATA["images"](tmp_path / "images"), inputs(folders["vit"])
    everything = [batch["pixel_values"] for batch in made.read(images, 99, 8)]

    def places(seed: int | None, limit: int) -> list[int]:
        found = [batch["pixel_values"] for batch in made.read(images, limit, 8, seed=seed)]
        return [next(i for i, one in enumerate(everything) if torch.equal(one, x)) for x in found]

    count = len(everything)
    assert places(None, 2) == [0, 1] and places(3, 99) == list(range(count))
    chosen = [places(seed, 2) for seed in range(60)]
    assert all(pair == sorted(set(pair)) and len(pair) == 2 for pair in chosen), "in their order, none twice"
    assert {place for pair in chosen for place in pair} == set(range(count))
    assert chosen[0] == places(0, 2)


def test_packing_is_for_models_that_go_on_with_a_text(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "A first line of words."}\n{"text": "And a second one."}\n' * 5)
    assert len({window.shape for window in inputs(folders["qwen3"]).read(file, 3, 8)}) == 1
    assert len({window.shape for window in inputs(folders["qwen3"]).read(file, 3, 64, packing=False)}) == 2
    assert len(inputs(folders["t5"]).read(file, 99, 64)) == 10
    with pytest.raises(ConfigError, match="takes each sample by itself"):
        inputs(folders["t5"]).read(file, 3, 8, packing=False)


@IMAGES
def test_images_and_audio_go_through_the_processor_of_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    images, audio = DATA["images"](tmp_path / "images"), DATA["audio"](tmp_path / "audio")
    image = inputs(folders["vit"], torch.bfloat16).read(images, 2, 8)
    assert [shapes(batch) for batch in image] == [{"pixel_values": (1, 3, 32, 32)}] * 2
    assert image[0]["pixel_values"].dtype == torch.bfloat16
    assert set(inputs(folders["clip"]).read(images, 1, 8)[0]) == {"pixel_values", "input_ids", "attention_mask"}
    sound = inputs(folders["whisper"]).read(audio, 9, 8)
    assert len(sound) == 4 and shapes(sound[0]) == {"input_features": (1, 16, 100), "decoder_input_ids": (1, 1)}


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_any_width_is_the_same_sound(width: int, folders: dict[str, Path], tmp_path: Path) -> None:
    from quark.jobs.folders.model_inputs import _open_audio

    wanted = np.sin(np.arange(800) / 9) * 0.5
    scaled = np.round(wanted * (1 << (8 * width - 1))).astype("<i4")
    raw = (scaled + 128).astype(np.uint8)[:, None] if width == 1 else scaled.view(np.uint8).reshape(-1, 4)[:, :width]
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(16000)
        file.writeframes(np.repeat(raw, 2, 0).tobytes())
    rate, found = _open_audio(tmp_path / "a.wav")
    assert rate == 16000 and np.abs(found - wanted).max() <= 0.5 / (1 << (8 * width - 1)) + 1e-7


def test_arrays_are_rows_by_the_names_of_arguments(folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    np.savez(file, pixel_values=np.ones((3, 3, 32, 32)))
    rows = inputs(folders["vit"], torch.float16).read(file, 2, 8)
    assert [shapes(row) for row in rows] == [{"pixel_values": (1, 3, 32, 32)}] * 2
    assert rows[0]["pixel_values"].dtype == torch.float16


def test_arrays_with_padding_are_cut(folders: dict[str, Path], tmp_path: Path) -> None:
    ids, mask = np.arange(12).reshape(3, 4), np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    np.savez(tmp_path / "rows.npz", input_ids=ids, attention_mask=mask)
    rows = inputs(folders["classifier"]).read(tmp_path / "rows.npz", 3, 8)
    assert [row["input_ids"].tolist() for row in rows] == [[[0, 1]], [[4, 5, 6, 7]]]
    np.savez(tmp_path / "rows.npz", input_ids=ids, attention_mask=np.zeros_like(mask))
    with pytest.raises(CalibrationError, match="masked positions only"):
        inputs(folders["classifier"]).read(tmp_path / "rows.npz", 3, 8)


def _pickled(folder: Path) -> Path:
    np.savez(folder / "a.npz", pixel_values=np.array([{"a": 1}], dtype=object))
    return folder / "a.npz"


def _npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def _written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def _uncaptioned(folder: Path) -> Path:
    (DATA["images"](folder) / "3.txt").unlink()
    return folder


def _image(path: Path, kind: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.arange(64).reshape(8, 8).astype(kind) * 1000).save(path)
    return path.parent


def _eps(path: Path) -> Path:
    """A page of PostScript, which Pillow would have Ghostscript run."""
    path.parent.mkdir()
    Image.new("RGB", (8, 8)).save(path, format="EPS")
    return path.parent


def _sound(path: Path, bits: int = 16, cut: int = 0) -> Path:
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 236, b"WAVE", b"fmt ", 16, 1, 1, 16000, 0, 0, bits, b"data", 200)
    return _written(path, head + bytes(200 - cut)).parent


WRONG: dict[str, tuple[str, Any, str]] = {
    "nothing there": ("vit", lambda t: t / "none", "is not there"),
    "a text for images": ("vit", lambda t: _written(t / "a.txt", b"hello"), "takes a folder of images"),
    "images for a text": ("classifier", lambda t: DATA["images"](t / "i"), "takes a text file"),
    "an empty folder": ("vit", lambda t: (t / "e").mkdir() or t / "e", "holds no sample"),
    "an empty text": ("classifier", lambda t: _written(t / "a.txt", b"\n \n"), "holds no sample"),
    "no text at all": ("classifier", lambda t: _written(t / "a.txt", b"\xff\xfe"), "UTF-8"),
    "no image": ("vit", lambda t: _written(t / "i" / "a.png", b"nothing").parent, "a.png cannot be read as an image"),
    "a program": ("vit", lambda t: _eps(t / "i" / "a.png"), "a.png cannot be read as an image: it is none of PNG"),
    "floats": ("vit", lambda t: _image(t / "i" / "a.tiff", np.float32), "32-bit floats, of which no range is known"),
    "a text for pairs": (
        "clip",
        lambda t: _written(t / "a.txt", b"hello"),
        "takes a folder of images, each beside its",
    ),
    "no caption": ("clip", lambda t: _uncaptioned(t / "i"), "3.txt has to hold a caption"),
    "no sound": ("whisper", lambda t: _written(t / "s" / "a.wav", b"RIFF").parent, "a.wav cannot be read"),
    "half a sound": ("whisper", lambda t: _sound(t / "s" / "a.wav", cut=1), "says 200 bytes of sound and holds 199"),
    "wide sound": ("whisper", lambda t: _sound(t / "s" / "a.wav", bits=64), "a.wav has samples of 64 bits"),
    "NaN": ("vit", lambda t: _npz(t, pixel_values=np.full((1, 3), np.nan)), "sample 0 of pixel_values holds NaN"),
    "too large": ("vit", lambda t: _npz(t, pixel_values=np.full((1, 3), 1e300)), "sample 0 of pixel_values holds NaN"),
    "pickles": ("vit", _pickled, "a.npz cannot be read"),
    "no archive": ("vit", lambda t: _written(t / "a.npz", b"PK\x03\x04"), "a.npz cannot be read"),
    "unknown names": ("vit", lambda t: _npz(t, pixels=np.ones((1, 2))), "unknown: pixels"),
    "unequal rows": ("clip", lambda t: _npz(t, pixel_values=np.ones((2, 2)), input_ids=np.ones((3, 2))), "samples"),
    "a number": ("vit", lambda t: _npz(t, pixel_values=np.float32(1)), "holds no sample"),
}


READ_BY_A_PROCESSOR = ("an empty folder", "no image", "a program", "floats", "no caption")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[IMAGES] if case in READ_BY_A_PROCESSOR else []) for case in WRONG]
)
def test_data_that_the_model_does_not_take_are_refused(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, make, message = WRONG[case]
    with pytest.raises(CalibrationError, match=message):
        inputs(folders[name]).read(make(tmp_path), 4, 8)


def test_grey_of_16_bits_keeps_its_range(tmp_path: Path) -> None:
    """Pillow makes white of all that is above 255."""
    for name in ("a.png", "a.tiff"):
        pixels = np.asarray(open_image(_image(tmp_path / "i" / name, np.uint16) / name, "RGB"))
        wanted = np.arange(64).reshape(8, 8) * 1000 / 257
        assert pixels.shape == (8, 8, 3) and np.abs(pixels - wanted[..., None]).max() <= 0.5


def test_another_rate_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1000))
    with pytest.raises(CalibrationError, match="8000 samples a second; the model takes 16000"):
        inputs(folders["whisper"]).read(tmp_path, 1, 8)


def test_a_folder_without_tokenizer_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds no tokenizer"):
        inputs(folders["whisper"])._processor("AutoTokenizer")


def test_a_model_of_several_main_inputs_takes_arrays_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    found = inputs(folders["vit"])

    class Tasks(found.model_class):  # type: ignore[misc, name-defined]
        main_input_name = ("pixel_values", "task_inputs")

    tasks = ModelInputs(found.folder, found.config, Tasks)
    assert not tasks.reads_text
    with pytest.raises(CalibrationError, match="Tasks takes an .npz with arrays"):
        tasks.read(DATA["images"](tmp_path / "i"), 4, 8)


def test_a_decoder_begins_with_the_token_that_generate_would_take(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers 5 moves it from config.json to generation_config.json when it saves a model."""
    folder = shutil.copytree(folders["t5"], tmp_path / "t5")
    found = inputs(folder)
    config = copy.deepcopy(found.config)

    def first() -> int:
        (batch,) = replace(found, config=config).read(TEXT / "heldout.txt", 1, 8)
        return int(batch["decoder_input_ids"][0, 0])

    assert first() == config.decoder_start_token_id == 0
    del config.decoder_start_token_id
    config.bos_token_id, config.pad_token_id = None, 3
    (folder / "generation_config.json").write_text("{}")
    assert first() == 3
    (folder / "generation_config.json").write_text('{"decoder_start_token_id": 5}')
    assert first() == 5


def test_a_model_without_a_limit_of_positions_takes_the_length_that_is_asked_for(folders: dict[str, Path]) -> None:
    """XLNet says -1."""
    found = inputs(folders["qwen3"])
    config = copy.deepcopy(found.config)
    config.max_position_embeddings = -1
    assert replace(found, config=config).read(TEXT / "heldout.txt", 1, 8)[0].shape == (1, 8)
