"""A model folder, opened once: what its files say, and the model of its class without weights.

Everything is found when it is first asked for, and is the same from then on: config.json and the headers of the weight
files are read once, the class is built once, and names are mapped once for each form of the model.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch

from quark.base.libraries.loading import as_format_error
from quark.base.libraries.transformers import folder_of, left_out
from quark.errors import FormatError
from quark.torch.checkpoint.safetensors_file import TensorFile
from quark.torch.checkpoint.sources.claims import check_claim
from quark.torch.checkpoint.sources.methods import AS_FLOAT, READ, method_of, quantization_of, readable_quantization
from quark.torch.checkpoint.sources.source import Source
from quark.torch.diffusion.component import STEM, is_component
from quark.torch.diffusion.network import common_dtype
from quark.torch.formats import FORMATS
from quark.torch.formats.gptq.auto_round import AUTO_ROUND
from quark.torch.model.folder_files import INDEX, shard_files
from quark.torch.model.meta_model import build_network, build_skeleton, named_dtype
from quark.torch.model.model_folder import check_sizes, load_config, read_config
from quark.torch.model.names import dropped_names, source_names

T = TypeVar("T")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of folders from the time before safetensors; torch reads tensors from them and runs nothing."""


class OpenedFolder:
    """A folder of a model of transformers, or of a network of diffusers.

    Args:
        path: The folder.
        trust_remote_code: Whether the code that it brings may run.

    Raises, where a property needs it:
        FormatError: config.json is absent or wrong; weight files are absent, damaged, or not as config.json says.
        NotSupportedError: It is quantized in a way that is not read.
    """

    def __init__(self, path: Path, trust_remote_code: bool = False) -> None:
        self.path, self.trust_remote_code = path, trust_remote_code
        self._known: dict[Any, Any] = {}

    @classmethod
    def of(cls, source: OpenedFolder | Path) -> OpenedFolder:
        """A folder by its path, or one that is opened already."""
        return source if isinstance(source, OpenedFolder) else cls(source)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json as it was written; see `read_config`."""
        return read_config(self.path)

    @cached_property
    def of_transformers(self) -> Any:
        """Its config as transformers reads it; not to be changed."""
        return load_config(self.path, self.config, self.trust_remote_code)

    @property
    def is_network(self) -> bool:
        """True where it is a network of diffusers."""
        return is_component(self.config)

    @property
    def method(self) -> str | None:
        """How it is quantized, see `method_of`; None where config.json is not there."""
        return method_of(self.config) if self.has_config else None

    @property
    def has_config(self) -> bool:
        """True where config.json is there; a model that was built by hand may have the name of another folder."""
        return (self.path / "config.json").is_file()

    @cached_property
    def is_read(self) -> bool:
        """True where the weights are read as float: they are, or are quantized in a way that sources may be.

        Raises NotSupportedError for what neither sources nor formats read: a program, or a part of what it can do.
        """
        if self.method is None and not self.config.get("quantization_config"):
            return True
        if self.method not in READ and (self.method in FORMATS or self.method in AUTO_ROUND):
            return False
        return quantization_of(self.config, self.path) is not None

    @property
    def computes_in_float(self) -> bool:
        """True where no layer computes with codes: it is float, or quantized in a way that is decoded when read."""
        return self.method is None or self.method in AS_FLOAT

    @cached_property
    def files(self) -> Sequence[TensorFile]:
        """Its safetensors files. Raises FormatError where there are none."""
        return [TensorFile(path) for path in shard_files(self.path)]

    @cached_property
    def metas(self) -> Mapping[str, torch.Tensor]:
        """Dtype and shape of the stored tensors, on the meta device, of pickled files too."""
        if _is_pickled(self.path):
            return {name: x for file in _pickled(self.path) for name, x in file.items()}
        return {name: file.meta(name) for file in self.files for name in file.names}

    @cached_property
    def metas_if_any(self) -> Mapping[str, torch.Tensor]:
        """Of a folder without all of its weights none: a plan needs none, and who reads them says what lacks."""
        try:
            if not _is_pickled(self.path):
                shard_files(self.path)
        except FormatError:
            return {}
        return self.metas

    @cached_property
    def source(self) -> Source:
        """The tensors as the float model has them. Raises FormatError where there are no safetensors files."""
        return Source(self.files, readable_quantization(self.config))

    @property
    def source_if_any(self) -> Source | None:
        """The tensors of the folder; None of one without config.json, or without safetensors files."""
        return self.source if self.has_config and any(self.path.glob("*.safetensors")) else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which transformers loads the model: that of config.json, else of the first floats that are stored."""
        if (named := named_dtype(self.config)) is not None:
            return named
        if self.is_network:
            return common_dtype(self.metas_if_any.values())
        if self.source_if_any is not None:
            return self.source.dtype()
        return next((x.dtype for x in self.metas_if_any.values() if x.is_floating_point()), torch.float32)

    def check_sizes(self) -> None:
        """Raise FormatError where config.json calls for more than the files hold; see `check_sizes`."""
        check_sizes(self.path, self.config, {name: tuple(x.shape) for name, x in self.metas_if_any.items()})

    def check(self) -> None:
        """Raise QuarkError where tensors are not stored as config.json says, or are not read; weights may be absent."""
        self._once("checked", self._check)

    def _check(self) -> None:
        check_claim(self.path, self.config, self.metas_if_any)
        if self.method in (*FORMATS, *AUTO_ROUND) and self.method not in READ:
            return
        if quantization_of(self.config, self.path) is not None and self.metas_if_any:
            self.source  # noqa: B018 - raises

    @cached_property
    def skeleton(self) -> Any:
        """The model without weights, parameters on the meta device; not to be changed: see `copy`."""
        self.check_sizes()
        if self.is_network:
            return build_network(self.path, self.config, self.dtype)
        config = copy.deepcopy(self.of_transformers)
        return build_skeleton(self.path, config, self.dtype, self.trust_remote_code)

    def copy(self) -> Any:
        """Another such model, for who changes it."""
        return copy.deepcopy(self.skeleton)

    def names(self, model: Any) -> Mapping[str, str]:
        """Name in a model of this class -> name in the files, stored or decoded; see `source_names`.

        Args:
            model: With or without weights, passes done or not.
        """
        stored = dict.fromkeys([*self.metas, *(self.source.names() if self.method in READ else ())])
        own = tuple(name for name in model.state_dict() if "_quantizer." not in name)  # of which no file has one
        return self._once(("names", type(model), own), lambda: source_names(model, stored))

    def float_names(self, model: Any) -> Mapping[str, str]:
        """Name in a model -> name in the files, of the float tensors alone."""
        floats = {*self.source.names()}
        return {name: stored for name, stored in self.names(model).items() if stored in floats}

    def dropped(self, model: Any) -> Sequence[str]:
        """The float tensors that a model of this class leaves out; see `dropped_names`."""
        key = ("dropped", type(model), *left_out(model))
        return self._once(key, lambda: dropped_names(model, self.source.names()))

    def close(self) -> None:
        """Let go of the weight files: what is mapped cannot be removed everywhere."""
        for name in ("files", "source"):
            vars(self).pop(name, None)

    def _once(self, key: Any, find: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found


def _is_pickled(folder: Path) -> bool:
    plain = any((folder / name).exists() for name in ("model.safetensors", INDEX)) or any(folder.glob(f"{STEM}*"))
    return not plain and any((folder / name).is_file() for name in PICKLED)


def _pickled(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    for path in sorted(folder.glob("pytorch_model*.bin")):
        with as_format_error(path):
            try:
                # Files from before torch 1.6 are no archives, and cannot be mapped.
                yield torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
            except UnpicklingError:  # torch answers in a page
                raise FormatError(
                    f"{path} is a pickle of more than tensors, or damaged; reading it could run code. Possible: "
                    "model.safetensors, which save_pretrained writes."
                ) from None


def opened_from(model: Any) -> OpenedFolder | None:
    """The folder that a model was loaded from, where its config says it and it is there."""
    path = folder_of(model.config) or getattr(model, "name_or_path", "")
    return OpenedFolder(Path(path)) if path and Path(path).is_dir() else None
