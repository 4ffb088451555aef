"""Sensitivity: how far the outputs move when one candidate alone changes. Measured once, kept in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import onnx_ir as ir

from quark.base.files import atomic_file
from quark.base.progress import progress
from quark.errors import ConfigError, FormatError
from quark.onnx.calibration.data.samples import Samples
from quark.onnx.calibration.statistics import fingerprint
from quark.onnx.config.settings import Settings
from quark.onnx.search.mixed_precision.candidates import Candidate, Option

FORMAT = "quark sensitivity 1"


@dataclass(frozen=True)
class Sensitivity:
    """What one candidate does.

    Attributes:
        candidate: Alone at another precision.
        scores: The distance under each of its options.
        enabled: Whether the user, in the file, lets it change.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    enabled: bool = True

    @property
    def best(self) -> int:
        """Index of the option that does least."""
        return self.scores.index(min(self.scores))

    @property
    def score(self) -> float:
        """The least distance."""
        return self.scores[self.best]

    @property
    def option(self) -> Option:
        """The option that does least."""
        return self.candidate.options[self.best]


class Cache:
    """A JSON file of scores; written whole after each candidate. No path: nothing is kept.

    Args:
        path: The file.
        key: Of everything that scores depend on; see `cache_key`.

    Raises:
        FormatError: The file is none of this version.
        ConfigError: It was measured under another key.
    """

    def __init__(self, path: str | None, key: str) -> None:
        self._path, self._key = path, key
        self._entries: dict[str, Mapping[str, Any]] = {}
        if path is None or not Path(path).exists():
            return
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            name, kept = data["format"], data["cache_key"]
            self._entries = {str(entry["name"]): entry for entry in data["results"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"sensitivity_cache_file: {path}: {type(error).__name__}: {error}.") from None
        if name != FORMAT or kept != key:
            raise ConfigError(
                f"sensitivity_cache_file: {path} was measured on another model, on other data or under other settings. "
                "Possible: another file name, or remove the file."
            )

    def get(self, candidate: Candidate) -> Sensitivity | None:
        """What the file says of a candidate."""
        entry = self._entries.get(candidate.name)
        if entry is None or len(entry["all_config_scores"]) != len(candidate.options):
            return None
        return Sensitivity(candidate, tuple(map(float, entry["all_config_scores"])), bool(entry.get("enabled", True)))

    def add(self, found: Sensitivity) -> None:
        """Keep what was measured."""
        name = found.candidate.name
        self._entries[name] = {
            "name": name,
            "candidate_nodes": found.candidate.nodes,
            "score": found.score,
            "all_config_scores": list(found.scores),
            "best_config_index": found.best,
            "enabled": found.enabled,
        }
        if self._path is not None:
            text = json.dumps({"format": FORMAT, "cache_key": self._key, "results": list(self._entries.values())})
            with atomic_file(self._path) as temporary:
                temporary.write_text(text, encoding="utf-8")


def analyse(
    candidates: Sequence[Candidate], score: Callable[[Option], float], cache: Cache, workers: int
) -> list[Sensitivity]:
    """The sensitivity of every candidate, least first; of equal ones, the first in the graph."""
    known = {candidate.name: cache.get(candidate) for candidate in candidates}
    left = [candidate for candidate in candidates if known[candidate.name] is None]

    def measure(candidate: Candidate) -> Sensitivity:
        return Sensitivity(candidate, tuple(score(option) for option in candidate.options))

    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(measure, candidate) for candidate in left]
        try:
            for done in progress(as_completed(running), "sensitivity", len(running)):
                found = done.result()
                known[found.candidate.name] = found
                cache.add(found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sorted((found for found in known.values() if found is not None), key=lambda found: found.score)


def table(ranked: Sequence[Sensitivity]) -> str:
    """The candidates, least sensitive first, as lines of text."""
    width = max(len("layer"), *(len(found.candidate.name) for found in ranked))
    lines = [f"{'rank':>4}  {'layer':{width}}  {'distance':>12}  {'nodes':>5}  becomes"]
    for rank, found in enumerate(ranked, 1):
        kinds = dict.fromkeys(_kind(spec) for _, spec in found.option)
        shown = ", ".join(kinds) + ("" if found.enabled else " (disabled)")
        nodes = len(found.candidate.nodes)
        lines.append(f"{rank:>4}  {found.candidate.name:{width}}  {found.score:>12.6g}  {nodes:>5}  {shown}")
    return "\n".join(lines)


def _kind(spec: Any) -> str:
    parts = {"A": spec.input, "W": spec.weight}
    return " ".join(f"{name}:{part.dtype}" for name, part in parts.items() if part is not None)


def cache_key(model: ir.Model, settings: Settings, data: Samples, parts: Sequence[Any]) -> str:
    """A hash of everything that scores depend on: the model, the samples, the settings and further parts."""
    kept = replace(
        settings, calibration=replace(settings.calibration, statistics=None), algorithms=(), external_data=False
    )
    digest = hashlib.sha256(repr((fingerprint(model), _plain(kept), _plain(list(parts)))).encode())
    for sample in data:
        for name, array in sorted(sample.items()):
            digest.update(repr((name, str(array.dtype), array.shape)).encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A value whose repr is the same in every process: sets are sorted, functions are their code."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, map(_plain, value)))
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if callable(value):
        code = getattr(value, "__code__", None)
        return getattr(value, "__qualname__", type(value).__qualname__), code.co_code if code is not None else b""
    return value
