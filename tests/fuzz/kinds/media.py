"""Conversations in JSON lines, images, and sounds, as calibration data of the models that read them."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import damage_bytes, damage_json, odd_file
from tests.fuzz.kinds.chat_templates import SOUND_TEMPLATE
from tests.fuzz.oracles import judge_folder
from tests.fuzz.program import quark, shown
from tests.models.model_folders import DATA, model_folder

LINES: tuple[bytes, ...] = (
    b"", b"null", b"[]", b"5", b'"x"', b"{", b"{}", b'{"text": null}', b'{"text": 5}', b'{"messages": []}',
    b'{"messages": [{"from": [], "value": "a"}]}', b'{"messages": [{"role": {}, "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "video", "video": "x.mp4"}]}]}',
    b'{"prompt": "a", "chosen": "b"}', b'{"text": "a", "text": "b"}', b'{"text": "\\ud800"}', b'{"text": "\xff"}',
    b'{"conversations": [{"from": "human", "value": {"a": 1}}]}', b'{"text": NaN}', b"[" * 99999,
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}]}',
)  # fmt: skip
PLACES = ("../../bases/llama/config.json", "/etc/hostname", "images/none.png", "images", "", "data:image/png;base64,%%",
          "http://127.0.0.1:9/x.png", "file:///etc/hostname", "pipe", 5, None, ["images/0.png"])  # fmt: skip


def _chat(random: Random, part: dict[str, Any] | None) -> Any:
    words = "the quick brown fox jumps over the lazy dog " * 5
    content = [part, {"type": "text", "text": words}] if part else words
    answer = [{"type": "text", "text": "a red square"}] if part else words
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def _llava(folder: Path) -> None:
    """A tiny model of images and text, with its processor."""
    import transformers
    from tokenizers import AddedToken

    model_folder("llava", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    word = tokenizer.convert_ids_to_tokens(2047)
    tokenizer.add_tokens(AddedToken(word, special=True))
    size = {"height": 32, "width": 32}
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        f"{{{{ '{word}' if p.type == 'image' else p.text }}}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
    )
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
        image_token=word,
    ).save_pretrained(folder)  # fmt: skip


def _llama(folder: Path, source: Path) -> None:
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(SOUND_TEMPLATE, encoding="utf-8")


def _part(random: Random, folder: Path, sound: bool) -> dict[str, Any]:
    """A part of a message that is an image: by its file, or in the line; damaged or not."""
    raw = (folder / "images" / "1.png").read_bytes()
    value: Any = "images/0.png"
    how = pick(random, ("file", "place", "place", "line", "bytes"))
    if how == "line" or (how == "bytes" and not sound):
        raw = raw if sound or how == "line" else damage_bytes(random, raw)[0]
        value = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    elif how == "place" and not sound:
        value = pick(random, PLACES)
    elif not sound:
        odd_file(random, folder / "images" / "0.png")
    return {"type": "image", "image": value}


def lines(random: Random, place: Place) -> Case:
    """JSON lines: texts and conversations, with images or without."""
    seen, sound = random.random() < 0.4, random.random() < SOUND
    if seen:
        model = place.bases.made("llava", _llava)
        DATA["images"](place.inputs / "images")
    else:
        model = place.bases.made("llama-chat", partial(_llama, source=place.bases.get("llama")))
    rows = [_chat(random, _part(random, place.inputs, True) if seen else None) for _ in range(4)]
    raw = [json.dumps(row).encode() for row in rows]
    at, said = int(random.integers(4)), "undamaged"
    how = "as it is" if sound else pick(random, ("json", "json", "line", "line", "bytes", "image"))
    if how == "json":
        tree, said = damage_json(random, rows[at])
        raw[at] = json.dumps(tree).encode()
    elif how == "line":
        raw[at] = pick(random, LINES)
        said = repr(raw[at])[:60]
    elif how == "bytes":
        raw[at], said = damage_bytes(random, raw[at])
    elif how == "image":
        row = _chat(random, _part(random, place.inputs, not seen) if seen else {"type": "image", "image": "x.png"})
        raw[at] = json.dumps(row).encode()
        said = f"image: {raw[at]!r:.150}"
    file = place.inputs / "chats.jsonl"
    file.write_bytes(b"\n".join(raw))
    return _case(place, model, file, said, sound)


def _vit(folder: Path, source: Path) -> None:
    import transformers

    shutil.copytree(source, folder)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, data: bytes = b"", depth: int = 8, colours: int = 2) -> bytes:
    """A PNG file that says this of itself, whatever its data are."""
    head = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")


PICTURES: dict[str, Callable[[], bytes]] = {
    "more pixels than any photograph": lambda: _png(60000, 60000),
    "many pixels of nothing": lambda: _png(9000, 9000, bytes(9000 * 27001)),
    "no pixels": lambda: _png(0, 0),
    "one pixel": lambda: _png(1, 1, b"\0\1\2\3"),
    "no such depth": lambda: _png(4, 4, bytes(64), 3),
    "no such colours": lambda: _png(4, 4, bytes(64), 8, 5),
    "a program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(marker) (w) file closefile\n",
    "a page": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://127.0.0.1:9/x'/></svg>",
    "a long comment": lambda: _png(2, 2, bytes(14))[:-12] + _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 28))),
}


def images(random: Random, place: Place) -> Case:
    """A folder of images for a model that takes images."""
    folder = DATA["images"](place.inputs / "images")
    model = place.bases.made("vit-images", partial(_vit, source=place.bases.get("vit")))
    sound, said = random.random() < SOUND, "undamaged"
    how = pick(random, ("bytes", "picture", "picture", "odd"))
    file = folder / f"{int(random.integers(8))}.png"
    if not sound and how == "bytes":
        changed, said = damage_bytes(random, file.read_bytes())
        file.write_bytes(changed)
    elif not sound and how == "picture":
        said = pick(random, PICTURES)
        file.write_bytes(PICTURES[said]())
    elif not sound:
        said = odd_file(random, file)
    return _case(place, model, folder, said, sound)


def _of_kind(kind: str, folder: Path) -> None:
    model_folder(kind, folder)


HEADERS = {"channels": (22, "<H"), "rate": (24, "<I"), "bytes a frame": (32, "<H"), "bits": (34, "<H"),
           "format": (20, "<H"), "size": (40, "<I"), "whole": (4, "<I")}  # fmt: skip


def sounds(random: Random, place: Place) -> Case:
    """A folder of sounds for a model that takes sounds."""
    folder = DATA["audio"](place.inputs / "sounds")
    model = place.bases.made("whisper", partial(_of_kind, "whisper"))
    sound, said = random.random() < SOUND, "undamaged"
    how, file = pick(random, ("bytes", "header", "header", "odd")), folder / f"{int(random.integers(4))}.wav"
    data = bytearray(file.read_bytes())
    if not sound and how == "bytes":
        changed, said = damage_bytes(random, bytes(data))
        file.write_bytes(changed)
    elif not sound and how == "header":
        name = pick(random, HEADERS)
        at, form = HEADERS[name]
        value = pick(random, (0, 1, 2, 3, 7, 33, 48000, 2**16 - 1, 2**32 - 1)) % (1 << 8 * struct.calcsize(form))
        data[at : at + struct.calcsize(form)] = struct.pack(form, value)
        said = f"{name} = {value}"
        file.write_bytes(bytes(data))
    elif not sound:
        said = odd_file(random, file)
    return _case(place, model, folder, said, sound)


def _case(place: Place, model: Path, data: Path, said: str, sound: bool) -> Case:
    """Weights are rounded alike whatever the data are; ranges may be those of anything."""
    output = place.outputs / "result"
    # Of each row of 100 words so many windows that all rows are read.
    length = ("--length", 16, "--samples", 24) if data.is_file() else ("--samples", 8)
    command = ("quantize", model, "--scheme", "int8", "--calib", data, *length, "-o", output)
    return Case(
        f"{model.name}: {said}: {shown(*command)}", partial(quark, *command), partial(judge_folder, model, output),
        (output,), margin=None, sound=sound,
    )  # fmt: skip
