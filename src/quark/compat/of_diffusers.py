"""Adds quark to the quantizers of diffusers, once that package is read: it has a table of them, and no search.

`import quark` is enough, before or after `import diffusers`; neither loads the other.
"""

from __future__ import annotations

import os.path
import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, PathEntryFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TABLE = "diffusers.quantizers.auto"
FOLDER = os.path.join("diffusers", "quantizers")  # noqa: PTH118 - the end of a text, not a path
HOOK = "quark.torch.checkpoint.hooks.of_diffusers"
ON_LOAD = "quark.torch.flows.on_load"
"""Home of what quantizes float folders while they load."""


def add_quark(table: Any) -> None:
    """Put quark into the tables of diffusers, as classes that are read when a network of quark's is loaded."""
    configs, quantizers = table.AUTO_QUANTIZATION_CONFIG_MAPPING, table.AUTO_QUANTIZER_MAPPING
    configs.setdefault("quark", _WhenUsed(HOOK, "QuarkNetworkConfig"))
    quantizers.setdefault("quark", _WhenUsed(HOOK, "QuarkNetworkQuantizer"))
    configs.setdefault("quark_on_load", _WhenUsed(f"{ON_LOAD}.config", "QuantizeOnLoad"))
    quantizers.setdefault("quark_on_load", _WhenUsed(f"{ON_LOAD}.of_diffusers", "QuarkOnLoadNetworkQuantizer"))


class _WhenUsed:
    """A class that is imported when it is called: it needs torch, and the class of diffusers that it derives from."""

    def __init__(self, home: str, name: str) -> None:
        self.home, self.name = home, name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(import_module(self.home), self.name)(*args, **options)

    def __instancecheck__(self, config: Any) -> bool:
        # Of configs for the components of a pipeline diffusers asks which entry of the table they are of.
        home = sys.modules.get(self.home)
        return home is not None and isinstance(config, getattr(home, self.name))

    def from_dict(self, stored: Any, **options: Any) -> Any:
        """As diffusers asks a class of configs."""
        return getattr(import_module(self.home), self.name).from_dict(stored, **options)


class _FinderOfQuantizers(PathEntryFinder):
    """Finds the modules of the folder of the table as another finder does, and adds quark to the table once read."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec: ModuleSpec | None = self.finder.find_spec(fullname, target)
        if fullname == TABLE and spec is not None and spec.loader is not None:
            spec.loader = _Reading(spec.loader)
        return spec

    def invalidate_caches(self) -> None:
        """Forget what was found in the folder."""
        self.finder.invalidate_caches()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the finder."""
        return getattr(self.finder, name)


class _Reading(Loader):
    """A loader that adds quark to what another has read."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        add_quark(module)


def _finder_of(entry: str) -> _FinderOfQuantizers:
    """The finder of the folder of the table. Python asks for one of each folder, and keeps it."""
    if entry.endswith(FOLDER):
        for hook in sys.path_hooks:
            if hook is not _finder_of:
                with suppress(ImportError):
                    return _FinderOfQuantizers(hook(entry))
    raise ImportError(entry)


def install() -> None:
    """Let diffusers know of quark, now or when it is read."""
    if TABLE in sys.modules:
        add_quark(sys.modules[TABLE])
    elif _finder_of not in sys.path_hooks:
        sys.path_hooks.insert(0, _finder_of)
        for entry in [entry for entry in sys.path_importer_cache if entry.endswith(FOLDER)]:
            del sys.path_importer_cache[entry]
