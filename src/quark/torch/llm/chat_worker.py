"""A worker that renders the chat template of a file, in a process of its own: with little memory, and it can be killed.

Run as a script, by `chat_templates`. Lines of JSON come in and go out:

    {"template": ..., "tokens": {...}}                          {} when the libraries are loaded
    {"messages": [...], "add_generation_prompt": false, "beside": {}}    {"text": ...} or {"error": ...}
"""

from __future__ import annotations

import json
import sys
from typing import Any

MEMORY = 4 << 30
"""Bytes of addresses, those of the libraries among them."""


def limit_memory() -> None:
    """Where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(render: Any, first: dict[str, Any], asked: dict[str, Any]) -> dict[str, str]:
    """The text of a conversation, or why there is none."""
    beside = dict(asked["beside"])
    given = {name: beside.pop(name, None) for name in ("tools", "documents")}
    try:
        texts, _ = render(
            conversations=[asked["messages"]], chat_template=first["template"],
            add_generation_prompt=asked["add_generation_prompt"], **given, **{**first["tokens"], **beside},
        )  # fmt: skip
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001 - whatever jinja2, or the template, says
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"text": texts[0]}


def serve() -> None:
    """Answer until the other side ends."""
    del sys.path[0]  # the folder of this file, whose names are no modules
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_memory()
    first = json.loads(sys.stdin.readline())
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(render_jinja_template, first, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
