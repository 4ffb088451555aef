"""What libraries do while they load that a command does not need: collecting garbage, and loading yet other libraries.

`without_collection`. Importing torch and transformers makes near a million objects that stay. Each time their number
has grown by a quarter, Python looks through all of them for cycles without an owner, which is a sixth of the time in
which a command starts.

`lightly`. The module of any class of transformers loads distributed tensors, the compiler of torch, SciPy's optimizers
and the list of all classes: three quarters of its time, for names that a command never uses which computes nothing with
a model. Inside, such a name is a `Later`: it loads its module, and is what it stands for, when it is used. And what
torch computes on the meta device asks for sizes by functions that know unknown ones too, whose module loads SymPy: here
they answer for numbers.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import resolve_name
from types import ModuleType
from typing import Any

TRANSFORMERS = "transformers"
TRIED = ("5.23", "5.24")
"""The versions of transformers that are known to load so, of which tests say that each class is the same; see there."""
SELDOM = (
    "accelerate",
    "scipy.optimize",
    "torch._dynamo",
    "torch.distributed._composable.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
    "transformers.generation.continuous_batching.cache",
    "transformers.processing_utils",
)
"""Modules, with all inside them, whose names wait in the modules of IMPORTERS."""
IMPORTERS = (TRANSFORMERS, "huggingface_hub")
COMPILER = "torch._dynamo"
MARKING = ("torch.compiler", "torch._compile")
"""Where torch marks functions for its compiler, which loads it."""
SYMBOLS, ALGEBRA = "torch.fx.experimental.symbolic_shapes", "sympy"
"""The functions by which torch asks for sizes that may be unknown, and what they load."""
COMPARING = ("torch", "torch._prims_common")
"""Where torch loads ALGEBRA only to ask whether a number is one of its expressions."""
HOMES = {
    "AutoConfig": "models.auto.configuration_auto",
    "CONFIG_MAPPING": "models.auto.configuration_auto",
    "PreTrainedModel": "modeling_utils",
    **dict.fromkeys(
        ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "MODEL_FOR_CAUSAL_LM_MAPPING"),
        "models.auto.modeling_auto",
    ),
}
"""Where the names lie that quark asks of the package itself, which else reads all of its files to know."""


_alone = False


def own_process() -> None:
    """Say that this process is a command's own, in which no other code expects to find libraries as they are."""
    global _alone
    _alone = True


@contextmanager
def without_collection() -> Iterator[None]:
    """Look for no garbage inside, where libraries are imported and a plan is made; who switched it off keeps it off."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Later:
    """A name of a module that is not loaded yet.

    Args:
        module: That holds it.
        find: Gives what it stands for; called once.
        name: Of a class: an object of it is made when it is used. None: of anything else.
    """

    def __init__(self, module: str, find: Callable[[], Any], name: str = "") -> None:
        self.__dict__.update(_module=module, _find=find, _is_class=name.lstrip("_")[:1].isupper())
        self.__dict__["_is_object"] = False

    def _unloaded(self) -> bool:
        return "_found" not in self.__dict__ and self._module not in sys.modules

    def _it(self) -> Any:
        if "_found" not in self.__dict__:
            self.__dict__["_found"] = self._find()
        return self._found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._is_class and self._unloaded()):
            return self._it()(*args, **kwargs)
        made = Later(self._module, lambda: self._it()(*args, **kwargs))
        made.__dict__["_is_object"] = True
        return made

    def __getitem__(self, key: Any) -> Later:
        return Later(self._module, lambda: self._it()[key])

    def __or__(self, other: Any) -> Later:
        return Later(self._module, lambda: self._it() | other)

    def __ror__(self, other: Any) -> Later:
        return Later(self._module, lambda: other | self._it())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and "_found" not in self.__dict__:
            raise AttributeError(name)  # what Python and `inspect` ask of anything
        return getattr(self._it(), name)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self._it(),)

    def __instancecheck__(self, value: Any) -> bool:
        # Of a class whose module is not loaded, there is nothing.
        return self._module in sys.modules and isinstance(value, self._it())

    def __subclasscheck__(self, kind: Any) -> bool:
        return self._module in sys.modules and issubclass(kind, self._it())

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if not isinstance(other, Later) and self._unloaded():
            return False
        return bool(self._it() == (other._it() if isinstance(other, Later) else other))

    def __hash__(self) -> int:
        return hash(self._it())

    def __bool__(self) -> bool:
        return (self._unloaded() and (self._is_class or self._is_object)) or bool(self._it())


class _Unread(ModuleType):
    """A module of SELDOM whose names are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == COMPILER and name in MARKS and COMPILER not in sys.modules:
            return MARKS[name]
        return Later(self.__name__, lambda: getattr(importlib.import_module(self.__name__), name), name)


def _not_compiled(fn: Any = None, recursive: bool = True, **options: Any) -> Any:
    """`torch._dynamo.disable`: before the compiler is loaded there is nothing to disable."""
    if fn is None:
        return lambda fn: _not_compiled(fn, recursive, **options)
    disabled: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(importlib.import_module(COMPILER).disable(fn, recursive, **options))
        return disabled[0](*args, **kwargs)

    run.__dict__.update(getattr(fn, "__dict__", {}), __wrapped__=fn)
    run.__name__, run.__qualname__, run.__doc__ = fn.__name__, fn.__qualname__, fn.__doc__
    return run


MARKS: dict[str, Callable[..., Any]] = {
    "disable": _not_compiled,
    "allow_in_graph": lambda fn: fn,
    "assume_constant_result": lambda fn: fn,
}
"""What marks functions for the compiler of torch, which what loads lightly is not for."""


def _same(sizes: Any, others: Any) -> bool:
    if isinstance(sizes, (tuple, list)) and isinstance(others, (tuple, list)):
        return len(sizes) == len(others) and all(map(_same, sizes, others))
    return bool(sizes == others)


_ITSELF = (
    "expect_true", "guard_bool", "guard_int", "guard_or_false", "guard_or_true", "guard_scalar",
    "guarding_hint_or_throw", "statically_known_true",
)  # fmt: skip
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ITSELF, lambda value: value),
    "has_guarding_hint": lambda _: True,
    "is_nested_int": lambda _: False,
    "sym_and": lambda *values: all(values),
    "sym_eq": _same,
    "sym_or": lambda *values: any(values),
}
"""What the functions of SYMBOLS give for numbers and truth values, which are no symbols."""
_NUMBERS = (bool, int)


def _is_known(value: Any) -> bool:
    return type(value) in _NUMBERS or (isinstance(value, (tuple, list)) and all(map(_is_known, value)))


class _Sizes(ModuleType):
    """SYMBOLS, whose functions load it when one is called with a symbol, or has no answer for numbers here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in OF_NUMBERS:
            return Later(SYMBOLS, lambda: getattr(importlib.import_module(SYMBOLS), name), name)

        def answer(*values: Any, **options: Any) -> Any:
            if not options and all(map(_is_known, values)):
                return OF_NUMBERS[name](*values)
            return getattr(importlib.import_module(SYMBOLS), name)(*values, **options)

        setattr(self, name, answer)
        return answer


class _Package(ModuleType):
    """A package of transformers whose own code is read when a name is asked for that none of its files explains."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = f"{self.__name__}.{name}"
        if self.__name__ == TRANSFORMERS and name in HOMES:
            return getattr(importlib.import_module(f"{TRANSFORMERS}.{HOMES[name]}"), name)
        if PathFinder.find_spec(inside, self.__path__) is not None:
            return importlib.import_module(inside)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            importlib.import_module(self.__name__)
        return getattr(sys.modules[self.__name__], name)


def _put_off(name: str, path: list[str] | None = None) -> _Package | None:
    """Put a package in its place without its code being read; None where it is not installed."""
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.submodule_search_locations is None:
        return None
    package = _Package(name)
    package.__spec__, package.__file__, package.__package__ = spec, spec.origin, name
    package.__loader__, package.__path__ = spec.loader, list(spec.submodule_search_locations)
    sys.modules[name] = package
    return package


def is_put_off(package: Any) -> bool:
    """Whether a package of `lightly` has not read its own code."""
    return isinstance(package, _Package)


def _waits(name: str, importer: str) -> bool:
    """Whether a module stays unread."""
    if name in sys.modules or importer.partition(".")[0] not in IMPORTERS:
        return False
    return any(name == seldom or name.startswith(f"{seldom}.") for seldom in SELDOM)


@contextmanager
def lightly() -> Iterator[None]:
    """Load transformers inside without what only training, compiling and serving need.

    What is loaded so computes what it always does; before torch compiles a model, `complete` is needed. Nothing is done
    outside of `own_process`, where transformers is loaded already, and of versions that were not tried.
    """
    if not _alone or TRANSFORMERS in sys.modules or not _is_tried() or (root := _put_off(TRANSFORMERS)) is None:
        yield
        return
    root.__version__ = version(TRANSFORMERS)  # type: ignore[attr-defined]
    root.models = _put_off(f"{TRANSFORMERS}.models", list(root.__path__))  # type: ignore[attr-defined]
    real, sizes = builtins.__import__, _Sizes(SYMBOLS)

    def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = (globals or {}).get("__name__") or ""
        marks = importer.partition(".")[0] in (TRANSFORMERS, "torch") and _without_compiler()
        if marks and name == COMPILER and not fromlist and importer in MARKING:
            return sys.modules["torch"]
        if marks and name == SYMBOLS and fromlist and name not in sys.modules:
            return sizes
        if importer in COMPARING and name == ALGEBRA and not fromlist and name not in sys.modules:
            return _Unread(name)
        if fromlist and importer:
            full = resolve_name("." * level + name, globals.get("__package__") or "") if level else name
            if _waits(full, importer):
                return _Unread(full)
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = load
    try:
        yield
    finally:
        builtins.__import__ = real
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(vars(torch).get("_dynamo"), _Unread):
            del torch._dynamo


def complete() -> None:
    """Load what waits in the modules of transformers: what goes on is more than was thought."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == TRANSFORMERS]:
        waiting = {name: value for name, value in vars(module).items() if type(value) is Later}
        for name, value in waiting.items():
            setattr(module, name, value._it())


def _is_tried() -> bool:
    try:
        return version(TRANSFORMERS).rpartition(".")[0] in TRIED
    except ImportError:  # PackageNotFoundError
        return False


def _without_compiler() -> bool:
    """Whether torch is loaded and its compiler is not: then torch has one whose names wait."""
    torch = sys.modules.get("torch")
    if torch is None or COMPILER in sys.modules or not hasattr(torch, "compiler"):
        return False
    vars(torch).setdefault("_dynamo", _Unread(COMPILER))
    return True
