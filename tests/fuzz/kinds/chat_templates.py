"""Chat templates of tokenizers: bombs of time and memory, and what reaches for Python."""

from __future__ import annotations

import json
from functools import partial

from tests.fuzz.case import SOUND, Case, Place, Random, pick
from tests.fuzz.damage import shorten
from tests.fuzz.program import quark, shown
from tests.models.torch_zoo import TEXT

SOUND_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
PARTS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}",
    "{{ 'a' * 30000000000 }}",
    "{{ (7 ** 900000000) | string }}",
    "{{ range(99999) | list | string }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ undefined.x.y }}",
    "{% for",
    "{{ 1 / 0 }}",
    "{{ '%s' | format(messages) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' | center(9000000000) }}",
    "{{ [[0] * 99999] * 99999 | length }}",
    "\0",
    "{{ '' }}",
)


def make(random: Random, place: Place) -> Case:
    sound = random.random() < SOUND
    template = SOUND_TEMPLATE
    if not sound:
        part = pick(random, PARTS).replace("MARKER", str(place.marker))
        template = pick(random, (part, part + SOUND_TEMPLATE, SOUND_TEMPLATE + part))
    folder = place.bases.copy("llama", place.inputs / "model")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    data = place.inputs / "chats.jsonl"
    words = (TEXT / "heldout.txt").read_text(encoding="utf-8")
    chats = [{"messages": [{"role": "user", "content": words[i : i + 300]}]} for i in range(0, 3000, 300)]
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    output = place.outputs / "result"
    command = ("quantize", folder, "--scheme", "int8", "--calib", data, "--samples", 2, "--length", 16, "-o", output)
    return Case(f"{shorten(template)}: {shown(*command)}", partial(quark, *command), outputs=(output,), sound=sound)
