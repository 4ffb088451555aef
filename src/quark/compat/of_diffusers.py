"""Adds quark to the quantizers of diffusers, once that package is read: it has a table of them, and no search.

`import quark` is enough, before or after `import diffusers`; neither loads the other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TABLE = "diffusers.quantizers.auto"
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


class AfterDiffusers(MetaPathFinder):
    """Finds the module of the table as it is found without this, and adds quark when it has been read."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Reading(spec.loader)
        return spec


class _Reading(Loader):
    """A loader that adds quark to what another has read."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        add_quark(module)


def install() -> None:
    """Let diffusers know of quark, now or when it is read."""
    if TABLE in sys.modules:
        add_quark(sys.modules[TABLE])
    elif not any(isinstance(finder, AfterDiffusers) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterDiffusers())
