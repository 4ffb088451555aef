"""Objects of YAML that every reader understands in one way: plain values, each name once, no aliases.

Numbers and words are those of YAML 1.2. Under 1.1, which PyYAML reads, 010 is 8, 1:30 is 90, and `no` is false.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

NULL = re.compile(r"~|null|Null|NULL|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
OCTAL = re.compile(r"[-+]?0[0-9]+")
"""Decimal in YAML 1.2, and octal in 1.1."""
_TAG = "tag:yaml.org,2002:"


def plain_yaml(text: str) -> Any:
    """Return the value of a text of YAML.

    Raises:
        yaml.YAMLError: It is no YAML, has aliases, a name twice or one that is no text, or a number that readers differ
            in. ValueError and RecursionError, too.
    """
    import yaml  # of an extra: only where such files are read

    return yaml.load(text, _loader())


def write_yaml(content: Any) -> str:
    """A text of plain values that `plain_yaml`, and readers of YAML 1.1, read as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        """Quotes what a reader of either version would not take for a text."""

    def text(dumper: Any, value: str) -> Any:
        taken = any(pattern.fullmatch(value) for pattern in (NULL, BOOL, INT, FLOAT))
        return dumper.represent_scalar(f"{_TAG}str", value, style='"' if taken else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100))


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Plain values only, each key once, and no aliases, by which a short file can stand for a huge one."""

        yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own, a table of each class

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _problem("anchors and aliases are not taken", event)
            if getattr(event, "tag", None):
                raise _problem(f"tags are not taken, here {event.tag!r:.60}", event)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.tag != f"{_TAG}str":
                    raise _problem(f"the key {key.value!s:.40} is no text; quotes make it one", key)
                if key.value in seen:
                    raise _problem(f"the key {key.value!r} stands there twice", key)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    def integer(loader: Any, node: Any) -> int:
        text = str(node.value)
        if OCTAL.fullmatch(text):
            raise _problem(f"{text} is octal to some readers; {int(text)} or 0o{text.lstrip('+-0') or 0} is not", node)
        if not INT.fullmatch(text):
            raise _problem(f"{text!r:.40} is no number", node)
        return int(text, 0)

    def _problem(text: str, node: Any) -> Exception:
        error: Exception = yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return error

    # The first that matches counts: 1 is an int before it is a float.
    for name, pattern, starts in (
        ("null", NULL, ["~", "n", "N", ""]), ("bool", BOOL, list("tTfF")), ("int", INT, list("-+0123456789")),
        ("float", FLOAT, list("-+.0123456789")),
    ):  # fmt: skip
        Loader.add_implicit_resolver(f"{_TAG}{name}", re.compile(rf"(?:{pattern.pattern})\Z"), starts)
    Loader.add_constructor(f"{_TAG}int", integer)
    return Loader
