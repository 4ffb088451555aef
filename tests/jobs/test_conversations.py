"""Conversations with images and sounds: the batches are those of the model's own processor, and what is refused."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken

import quark
from quark.errors import CalibrationError, ConfigError, FormatError
from quark.jobs.folders.model_inputs import ModelInputs
from quark.jobs.folders.models import inputs_of, open_folder, skeleton_of
from tests.models.model_folders import DATA, model_folder
from tests.models.torch_zoo import LANGUAGE_MODEL
from tests.models.versions import IMAGES

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{{ IMAGE if p.type == 'image' else SOUND if p.type == 'audio' else p.text }}{% endfor %}{% endfor %}"
)
SIZE = {"height": 32, "width": 32}
pytestmark = IMAGES


def tokenizer_with(folder: Path, token: int) -> tuple[Any, str]:
    """The tokenizer of the example model, one token of which stands for images or sounds, and this token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    word = tokenizer.convert_ids_to_tokens(token)
    tokenizer.add_tokens(AddedToken(word, special=True))
    return tokenizer, word


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder("llava", tmp_path_factory.mktemp("llava") / "model")
    tokenizer, word = tokenizer_with(folder, 2047)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIZE)
    template = TEMPLATE.replace("IMAGE", f"'{word}'").replace("SOUND", "''")
    transformers.LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template, image_token=word,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def chat(*parts: Any, answer: str = "A red square.") -> dict[str, Any]:
    question = [*parts, {"type": "text", "text": "What is this?"}]
    reply = [{"type": "text", "text": answer}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Lines with an image, with two, and with none."""
    images = DATA["images"](tmp_path / "images")
    whole = "data:image/png;base64," + base64.b64encode((images / "1.png").read_bytes()).decode()
    return lines(
        tmp_path / "chats.jsonl",
        chat({"type": "image", "image": "images/0.png"}),
        chat({"type": "image_url", "image_url": {"url": whole}}, {"type": "image", "path": "images/2.png"}),
        chat(),
        {"text": "A text alone."},
        *(chat({"type": "image", "url": f"images/{n}.png"}) for n in range(3, 8)),
    )


def inputs(folder: Path) -> Any:
    return inputs_of(folder, skeleton_of(open_folder(folder)))


def test_chats_with_images_are_what_the_processor_makes_of_them(llava: Path, data: Path) -> None:
    batches = inputs(llava).read(data, 99, 512)
    processor = transformers.AutoProcessor.from_pretrained(llava)
    assert len(batches) == 9
    for row, batch in zip(map(json.loads, data.read_text().splitlines()), batches, strict=True):
        for message in row.get("messages", ()):
            for part in (part for part in message["content"] if part["type"] != "text"):
                name = next((part[key] for key in ("image", "path", "url") if key in part), "images/1.png")
                part.clear()
                part |= {"type": "image", "image": Image.open(data.parent / name).convert("RGB")}
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        made = processor.apply_chat_template(row["messages"], **options) if "text" not in row else None
        wanted = processor(text=[row["text"]], return_tensors="pt") if made is None else made
        assert {*batch} == {*wanted} & {*inputs(llava).names}
        for name, value in batch.items():
            assert torch.equal(value, torch.as_tensor(wanted[name]).to(value.dtype)), name
    assert (batches[1]["input_ids"] == 2047).sum() == 2 * 16 and len(batches[1]["pixel_values"]) == 2


@pytest.mark.slow
def test_they_calibrate_and_measure_a_model(llava: Path, data: Path, tmp_path: Path) -> None:
    made = quark.quantize(llava, "int8", data=data, samples=4, output=tmp_path / "made", verdict=True)
    measured: Any = quark.evaluate(llava, made, data=data)
    batches = inputs(llava).read(data, 99, 256)
    both = [transformers.LlavaForConditionalGeneration.from_pretrained(llava).eval(), measured.after]
    total, count, divergence = np.zeros(2), 0, []
    for batch in batches:
        with torch.no_grad():
            logits = [model(**batch).logits[0].double() for model in both]
        ids = batch["input_ids"][0]
        text = ids[1:] != 2047
        likely = [x.log_softmax(-1) for x in logits]
        total -= [float(x[:-1].gather(1, ids[1:, None])[text].sum()) for x in likely]
        count += int(text.sum())
        rows = (likely[0].exp() * (likely[0] - likely[1])).sum(1)
        divergence += rows[torch.cat([text, text.new_ones(1)])].tolist()
    assert measured.comparison.perplexity == pytest.approx(np.exp(total / count), rel=1e-4)
    assert measured.comparison.kl == pytest.approx(np.mean(divergence), rel=1e-3)


@pytest.mark.slow
def test_chats_with_sounds_are_what_the_processor_makes_of_them(tmp_path: Path) -> None:
    tokenizer, word = tokenizer_with(LANGUAGE_MODEL, 2047)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400)
    template = TEMPLATE.replace("SOUND", f"'{word}'").replace("IMAGE", "''")
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template=template, audio_token=word)
    processor.save_pretrained(tmp_path / "model")
    waves = DATA["audio"](tmp_path / "waves")
    data = lines(tmp_path / "chats.jsonl", chat({"type": "audio", "audio_url": "waves/1.wav"}))
    kind = transformers.Qwen2AudioForConditionalGeneration
    (batch,) = ModelInputs(tmp_path / "model", transformers.Qwen2AudioConfig(), kind).read(data, 9, 512)
    frames = np.frombuffer((waves / "1.wav").read_bytes()[44:], "<i2").astype(np.float32) / 32768
    text = f"[user]{word}What is this?[assistant]A red square."
    wanted = processor(text=[text], audio=[frames], sampling_rate=16000, return_tensors="pt")
    assert torch.equal(batch["input_ids"], wanted["input_ids"]) and (batch["input_ids"] == 2047).sum() == 25
    assert torch.allclose(batch["input_features"], wanted["input_features"][..., : batch["input_features"].shape[-1]])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "address": ({"type": "image", "url": "https://example.org/a.png"}, "nothing is downloaded"),
    "absent": ({"type": "image", "image": "absent.png"}, r"line 1, its image: .*absent\.png cannot be read"),
    "outside": ({"type": "image", "image": "../a.png"}, "line 1, its image: .* which is outside the folder"),
    "absolute": ({"type": "image", "image": "/dev/zero"}, "line 1, its image: .* which is outside the folder"),
    "pipe": ({"type": "input_audio", "input_audio": {"url": "pipe"}}, "line 1, its audio: .*pipe is a folder, a pipe"),
    "nothing": ({"type": "image"}, "says no file"),
    "no base64": ({"type": "image", "image": "data:image/png;base64,!"}, "line 1, its image cannot be read|no base64"),
    "video": ({"type": "video", "video": "a.mp4"}, "has a video"),
    "sound": ({"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}, "its audio cannot be read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, llava: Path, tmp_path: Path) -> None:
    part, message = REFUSED[name]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CalibrationError, match=message):
        inputs(llava).read(lines(tmp_path / "chats.jsonl", chat(part)), 9, 512)


def test_models_and_folders_that_take_no_images_say_so(llava: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="LlamaForCausalLM reads text alone"):
        inputs(LANGUAGE_MODEL).read(data, 9, 512)
    with pytest.raises(FormatError, match="holds no processor"):
        inputs(model_folder("llava", tmp_path / "bare")).read(data, 9, 512)
    with pytest.raises(ConfigError, match="samples by themselves"):
        inputs(llava).read(data, 9, 512, packing=True)
