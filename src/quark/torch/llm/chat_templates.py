"""Chat templates, which are programs of whoever made the model: run within a bound of time and memory.

jinja2's sandbox keeps a template from files and from Python, and not from two loops of 100,000 each.
"""

from __future__ import annotations

import atexit
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from quark.errors import CalibrationError, FormatError, one_line
from quark.torch.llm import chat_worker

SECONDS, STARTING = 10.0, 120.0
"""For one conversation, and before the first one, for the libraries."""


def render_chat(
    tokenizer: Any, messages: Any, add_generation_prompt: bool = False, beside: Mapping[str, Any] | None = None
) -> str:
    """A conversation as the model reads it, by its chat template.

    Args:
        tokenizer: Of transformers, with a chat template.
        messages: The conversation.
        add_generation_prompt: Whether the turn of the model begins at the end.
        beside: What else the template reads, by name: tools, documents ...

    Raises:
        CalibrationError: The template refuses the messages.
        FormatError: It takes too long, or too much memory.
    """
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        # A class of its own that knows no template, or no class of transformers.
        options = {**({"add_generation_prompt": True} if add_generation_prompt else {}), **(beside or {})}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    template, tokens = tokenizer.get_chat_template(), json.dumps(tokenizer.special_tokens_map, default=str)
    answer = _Worker.of(template, tokens).ask(messages, add_generation_prompt, beside or {})
    if "text" in answer:
        return str(answer["text"])
    if answer["error"] == "it takes too much memory":
        raise FormatError("The chat template of the tokenizer takes more memory than a conversation can need.")
    raise CalibrationError(f"the chat template of the model refuses the messages: {one_line(answer['error'])[:200]}.")


class _Worker:
    """A process that renders one template; it ends with this one."""

    running: ClassVar[dict[tuple[str, str], _Worker]] = {}
    """One, by its template and special tokens."""

    @classmethod
    def of(cls, template: str, tokens: str) -> _Worker:
        """The worker of a template. That of another one is ended."""
        key = template, tokens
        if key not in cls.running:
            cls.end_all()
            cls.running[key] = cls({"template": template, "tokens": json.loads(tokens)})
        return cls.running[key]

    @classmethod
    def end_all(cls) -> None:
        """End what runs."""
        while cls.running:
            cls.running.popitem()[1]._end()

    def __init__(self, first: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(chat_worker.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._is_ready = False
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()
        self._send(first)

    def ask(self, messages: Any, add_generation_prompt: bool, beside: Mapping[str, Any]) -> dict[str, str]:
        """Return the worker's answer for a conversation. Raises FormatError where none comes in time, and ends it."""
        if not self._is_ready:
            self._line(STARTING)
            self._is_ready = True
        self._send({"messages": messages, "add_generation_prompt": add_generation_prompt, "beside": {**beside}})
        answer: dict[str, str] = json.loads(self._line(SECONDS))
        return answer

    def _line(self, seconds: float) -> str:
        """The next line of the worker."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            line = None
        if line:
            return line
        self.end_all()
        what = f"takes more than {seconds:.0f} s" if line is None else "cannot be run, or takes too much memory,"
        raise FormatError(f"The chat template of the tokenizer {what} on one conversation.")

    def _send(self, value: Any) -> None:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise CalibrationError(f"a conversation holds what is no plain value: {error}.") from None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it ended; the answer says so

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not sent any more
                assert pipe is not None
                pipe.close()


atexit.register(_Worker.end_all)
