"""Texts that every Python carries: prose and code, for calibration and held out."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

CODE = ("argparse", "csv", "fractions", "statistics", "textwrap")
"""Modules of the standard library that are held out."""


def texts(place: Path) -> dict[str, Path]:
    """Name -> file of "calibration", "prose" and "code", which are written where they are missing."""
    shuffled = [text.strip() for _, text in sorted(topics.items())]
    random.Random(0).shuffle(shuffled)
    half = len(shuffled) // 2
    library = Path(os.__file__).parent
    contents = {
        "calibration": "\n\n".join(shuffled[:half]),
        "prose": "\n\n".join(shuffled[half:]),
        "code": "\n\n".join((library / f"{name}.py").read_text("utf-8") for name in CODE),
    }
    files = {name: place / f"{name}.txt" for name in contents}
    for name, file in files.items():
        if not file.exists():
            file.write_text(contents[name], "utf-8")
    return files


def sentences(text: str, count: int) -> Sequence[str]:
    """Sentences of 30 to 300 characters of a text, none of them twice, in an order of chance that is always the same.

    Args:
        text: Prose whose paragraphs are set apart by empty lines.
        count: How many.
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    found = dict.fromkeys(one for paragraph in paragraphs for one in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph))
    chosen = [one for one in found if 30 <= len(one) <= 300 and one.endswith((".", "!", "?"))]
    random.Random(0).shuffle(chosen)
    return chosen[:count]
