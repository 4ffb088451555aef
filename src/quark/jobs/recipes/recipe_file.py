"""Reads a recipe: YAML of plain values, however it was damaged, or meant to do harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from quark.base.files import require_regular
from quark.base.yaml_objects import plain_yaml
from quark.errors import FormatError

LARGEST = 1 << 20
"""Bytes of a recipe."""


def read_recipe(file: Path) -> dict[str, Any]:
    """The content of a recipe, which is not checked yet.

    Raises:
        FormatError: It is no regular file, too large, or no YAML of plain values; says where.
    """
    require_regular(file)
    try:
        if file.stat().st_size > LARGEST:
            raise FormatError(f"{file} has {file.stat().st_size} bytes; a recipe has at most {LARGEST}.")
        content = plain_yaml(file.read_text(encoding="utf-8"))
    except FormatError:
        raise
    except OSError as error:
        raise FormatError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is no UTF-8 text: {error}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise FormatError(f"{file}{place}: {error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} is no YAML of a recipe: {error}.") from None
    if not isinstance(content, dict):
        raise FormatError(f"{file} holds no recipe: keys with values are needed, as in `model: ./llama`.")
    return content
