"""Images and sounds in conversations, of which the processor of a model makes inputs. Nothing is downloaded.

{"type": "image", "image": "a.png"}               a file, by its place in the folder of the data; or "url", "path"
{"type": "image_url", "image_url": {"url": ""}}   the same, as OpenAI has it; input_image, audio_url, input_audio
data:image/png;base64,...                         the file itself, in the place of its name; or under "base64"
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.base.data_files.images import open_image
from quark.base.data_files.sounds import read_sound
from quark.errors import CalibrationError, FormatError, MissingDependencyError, one_line
from quark.torch.model.folder_files import file_of

IMAGE, AUDIO, VIDEO = "image", "audio", "video"
TYPES = {IMAGE: ("image", "image_url", "input_image"), AUDIO: ("audio", "audio_url", "input_audio"),
         VIDEO: ("video", "video_url")}  # fmt: skip
"""Kind of a part of a message -> its types, which are keys of it too."""
PLACES = ("url", "path", "data", "base64")
"""Other keys that say where it is; the last two hold the file itself."""


def media_in(messages: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of messages that are no text, with what each is: IMAGE, AUDIO or VIDEO."""
    for message in messages:
        for part in _parts(message):
            if (kind := _kind(part)) is not None:
                yield kind, part


def for_template(messages: Sequence[Any]) -> list[Any]:
    """Messages whose parts have one form, of the types that chat templates ask for, and no files in them."""
    made = []
    for message in messages:
        parts = [part if (kind := _kind(part)) is None else {"type": kind, kind: ""} for part in _parts(message)]
        made.append({**message, "content": parts} if parts else message)
    return made


def opened(messages: Sequence[Any], place: str, folder: Path) -> dict[str, list[Any]]:
    """The images, of Pillow, and the sounds, each its rate and its samples, in their order.

    Args:
        messages: Of a conversation.
        place: Where it stands, for errors.
        folder: Where names of files begin.

    Raises:
        CalibrationError: A file is not there, would have to be downloaded, or cannot be read; or it is a video.
    """
    found: dict[str, list[Any]] = {IMAGE: [], AUDIO: []}
    for kind, part in media_in(messages):
        if kind == VIDEO:
            raise CalibrationError(f"{place} has a video. Possible: its pictures, as parts of the type 'image'.")
        file = _file(kind, part, place, folder)
        name = file if isinstance(file, Path) else f"{place} its {kind}"
        try:
            found[kind].append(open_image(file, "RGB") if kind == IMAGE else read_sound(file))
        except MissingDependencyError:
            raise
        except Exception as error:  # noqa: BLE001 - of Pillow: each format has its own
            raise CalibrationError(f"{name} cannot be read: {one_line(error).rstrip('.')}.") from None
    return found


def processed(processor: Any, text: str, media: Mapping[str, Sequence[Any]], place: str) -> Mapping[str, Any]:
    """The inputs that a processor of transformers makes of a text and its media, as its `apply_chat_template` does.

    Args:
        processor: Of the model, with a tokenizer.
        text: As the chat template wrote it.
        media: Of `opened`.
        place: Where they stand, for errors.

    Raises:
        CalibrationError: It refuses them; or sounds of another rate than it reads.
    """
    given: dict[str, Any] = {"images": [[*media[IMAGE]]]} if media[IMAGE] else {}
    if media[AUDIO]:
        wanted = getattr(getattr(processor, "feature_extractor", None), "sampling_rate", None)
        for rate, _ in media[AUDIO]:
            if rate != wanted:
                raise CalibrationError(f"{place} has a sound of {rate} samples a second; the model takes {wanted}.")
        given |= {"audio": [samples for _, samples in media[AUDIO]], "sampling_rate": wanted}
    if text.startswith(processor.tokenizer.bos_token or "\0"):  # which the processor would put there again
        given["add_special_tokens"] = False
    try:
        made: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **given)
    except Exception as error:  # noqa: BLE001 - each processor has its own
        raise CalibrationError(f"{place} is refused by the processor of the model: {one_line(error)[:200]}.") from None
    return made


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else ()


def _kind(part: Any) -> str | None:
    """The kind of a part of a message; None for a text."""
    if not isinstance(part, Mapping):
        return None
    of_part = {str(part.get("type")), *(key for key, value in part.items() if value is not None)}
    return next((kind for kind, types in TYPES.items() if of_part.intersection(types)), None)


def _file(kind: str, part: Mapping[str, Any], place: str, folder: Path) -> Path | io.BytesIO:
    """The regular file of an image or a sound, within the folder. Raises CalibrationError where there is none."""
    inner = next((part[key] for key in TYPES[kind] if isinstance(part.get(key), Mapping)), part)
    key = next((key for key in (*TYPES[kind], *PLACES) if isinstance(inner.get(key), str) and inner[key]), None)
    if key is None:
        raise CalibrationError(
            f"{place} has a part of the type {kind!r} that says no file. Possible: the name of one, or a data: URI."
        )
    value = str(inner[key])
    if value.startswith("data:") or key in PLACES[2:]:
        try:
            return io.BytesIO(base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value))
        except ValueError:
            raise CalibrationError(f"{place} has a part of the type {kind!r} that is no base64.") from None
    if "://" in value:
        raise CalibrationError(
            f"{place} has the address {value[:100]}, and nothing is downloaded. Possible: the name of a file beside "
            "the data, or a data: URI."
        )
    try:
        return file_of(folder, value)
    except FormatError as error:
        raise CalibrationError(f"{place} its {kind}: {one_line(error)}") from None
