"""The picture of the rooms, from the arrows of the architecture: python -m tests.rooms_picture > docs/rooms.svg."""

from __future__ import annotations

import sys
from html import escape

from tests.test_architecture import ARROWS

WHAT = {
    "cli": "the program quark",
    "one_call": "the functions quark.quantize, ...",
    "commands": "one file for each command: reads arguments, prints results",
    "jobs": "a request as one object, the decisions it needs, and running it",
    "torch": "the PyTorch flow",
    "onnx": "the ONNX flow",
    "onnx_ops": "custom ONNX operators",
    "gguf": "GGUF files",
    "goals": "what programs can load",
    "report": "HTML pages with figures and tables",
    "core": "numerics on numpy and torch arrays: types, scales, observers, solvers",
    "base": "files, logs, progress, checks of input",
    "errors": "every exception",
}
"""What each room does. A room of ARROWS that is not here is not drawn."""

WIDTH, HEIGHT, GAP, LEFT = 860, 46, 10, 60
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.name { font: bold 14px ui-monospace, monospace }
.room { fill: #ddf4ff; stroke: #54aeff }
.side { fill: none; stroke: #8b949e; stroke-width: 2 }
.note { fill: #8b949e }
"""


def picture() -> str:
    """The picture as SVG: a row for each floor, the highest at the top. Its boxes are light on any background."""
    floors = [[name for name in floor.split() if name in WHAT] for floor in reversed(ARROWS)]
    floors = [floor for floor in floors if floor]
    height = len(floors) * (HEIGHT + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>The rooms of quark. A room imports only from rooms that are drawn below it.</title>",
        f"<style>{STYLE}</style>",
        f'<path class="side" d="M30 {GAP}V{height - GAP}m-6 -10l6 10l6 -10"/>',
        f'<text class="note" text-anchor="middle" transform="translate(20 {height / 2:g}) rotate(-90)">imports</text>',
    ]
    for row, floor in enumerate(floors):
        width = (WIDTH - LEFT - GAP * len(floor)) / len(floor)
        for column, name in enumerate(floor):
            x, y = LEFT + column * (width + GAP), GAP + row * (HEIGHT + GAP)
            lines += [
                f'<rect class="room" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" rx="6"/>',
                f'<text class="name" x="{x + 12:.1f}" y="{y + 19}">{name}</text>',
                f'<text x="{x + 12:.1f}" y="{y + 37}">{escape(WHAT[name])}</text>',
            ]
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    sys.stdout.write(picture() + "\n")
