"""Saving of ONNX models: a file, and the weights in a file beside it where that is asked for or they are too large.

At no moment does a model lie beside the weights of another run: weights that differ from those of the model that is
replaced get a name of their own, the model is renamed last, and the weights that it no longer reads are removed after.
"""

from __future__ import annotations

import filecmp
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from quark.base.files import check_file, digest_of, flush, replace_file, temporary_folder
from quark.errors import FormatError, one_line
from quark.onnx_ops.custom_libraries import session_options
from quark.onnx_ops.graph_writer import fixed_shape

SMALL = 1024
"""Bytes below which a weight stays inside the model."""
PROTOBUF_LIMIT = 2**31 - 2**20
IR_VERSION = b"\x08"
"""The first byte of a model: the tag of its first field."""
_ANY_FILE = 2**20
"""Bytes of a file that may name weights whatever it begins with: a model as text, or one of another order."""
_LONGEST_STEM = 255 - len(".0123456789ab.data")
"""Bytes of a model's name that the names of its weights begin with."""


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data: bool = False,
    overwrite: bool = True,
    look: Callable[[Path], object] | None = None,
) -> None:
    """Check and write a model; the file appears whole or not at all.

    Args:
        model: The model.
        path: Where to.
        external_data: Write weights to `<name>.data` beside it, or to `<name>.<hash>.data` where a model is replaced
            that reads other weights from there. A model over 2 GB, and one that was read with weights outside and still
            has some of them, is always written so.
        overwrite: Replace a file that is there.
        look: Called with the file, whole, before it has its place; what it raises leaves nothing.

    Raises:
        OutputExistsError, OutputError: See `quark.base.files.check_file`. No part of a file stays.
        FormatError: The model is not valid.
    """
    target = check_file(path, overwrite)
    read = files_read(model)
    outside = external_data or bool(read) or weight_bytes(model) > PROTOBUF_LIMIT
    with temporary_folder(target) as temporary:
        file, data = temporary / target.name, temporary / f"{_stem(target)}.data"
        ir.save(model, file, external_data=data.name if outside else None, size_threshold_bytes=SMALL)
        before = _Before(target, read)
        if data.exists():
            data = data.rename(temporary / before.name_for(data))
            _relocate(file, data.name)
        check_valid(file, f"What would be written to {target} is no valid ONNX model")
        if look is not None:
            look(file)
        if data.exists():
            flush(data)
            before.stale.discard(data.replace(target.with_name(data.name)))
            flush(target.parent)
        replace_file(file, target, before.stale)


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def message_without_weights(model: ir.Model) -> onnx.ModelProto:
    """The model as a message that names its large weights as external: for what looks at the graph alone."""
    values = model.graph.initializers.values()
    with named_as_external(model, [v for v in values if v.const_value is not None and v.const_value.nbytes >= SMALL]):
        return ir.to_proto(model)


@contextmanager
def named_as_external(model: ir.Model, weights: Sequence[ir.Value]) -> Iterator[None]:
    """Within, a message of the model names these initializers as weights outside, in no file that there is."""
    others = set(model.graph.initializers.values()) - set(weights)
    # Codes are computed from their weights when they are read: the small ones must be while these are in place.
    stand_ins: dict[ir.Value, ir.TensorProtocol] = {
        value: ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=fixed_shape(tensor), name=tensor.name)
        for value in others
        if isinstance(tensor := value.const_value, ir.LazyTensor)
    }
    for value in weights:
        tensor = value.const_value
        assert tensor is not None
        stand_ins[value] = stand_in(tensor, value.name or "")
    tensors = {value: value.const_value for value in stand_ins}
    try:
        for value, other in stand_ins.items():
            value.const_value = other
        yield
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor


def stand_in(tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
    """Return what stands for a tensor outside its message: its name, type and shape, of no file that there is."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("memory", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)


def files_read(model: ir.Model) -> set[Path]:
    """The files that hold initializers of the model."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return {Path(tensor.path).resolve() for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


def model_files(source: Any) -> list[Path]:
    """The files of a model: its own, and those of its weights that it names. Of what is no path: none."""
    if not isinstance(source, (str, os.PathLike)):
        return []
    return [Path(source), *sorted(_files_of(Path(source)))]


def _stem(target: Path) -> str:
    return os.fsencode(target.name)[:_LONGEST_STEM].decode(errors="ignore")


class _Before:
    """The weights that lie beside a target before it is written.

    Args:
        target: The model.
        read: Files that the new model takes its weights from. None of them is written or removed.

    Attributes:
        stale: Those that were written for the target alone and that nothing reads when it is replaced: what it names,
            and weights of runs that were killed.
    """

    def __init__(self, target: Path, read: set[Path]) -> None:
        self.target = target
        pattern = re.compile(re.escape(_stem(target)) + r"(\.[0-9a-f]{12})?\.data")
        found = {path for path in target.parent.iterdir() if pattern.fullmatch(path.name) and path.is_file()}
        # Weights may bear this name and be those of another model: one that was renamed, lies above, or shares them.
        named = _named_by_others(found, target) if found else set()
        self.free = {path for path in found if path.resolve() not in read} - named
        # A file of the plain name may be anyone's, but what the target names is its own.
        plain, own = target.with_name(f"{_stem(target)}.data"), _files_of(target) if found else set()
        self.stale = {path for path in self.free if path != plain or path.resolve() in own}

    def name_for(self, data: Path) -> str:
        """The name of new weights: one that no other weights have at this time.

        It depends on nothing but the files that are there and the weights: the same run gives the same bytes.
        """
        plain = self.target.with_name(data.name)
        if not plain.exists() and not self.stale:
            return data.name
        hashed = f"{_stem(self.target)}.{digest_of(data)[:12]}.data"
        if self.target.with_name(hashed).exists():
            return hashed
        same = plain in self.free and filecmp.cmp(plain, data, shallow=False)
        return data.name if same or not plain.exists() else hashed


def _named_by_others(data: set[Path], target: Path) -> set[Path]:
    """Those of these files, all beside `target`, whose names any other file holds that may be a model.

    Whatever it is called: a copy is a model under any suffix. A model reads what lies beside it or below.
    """
    names = {os.fsencode(path.name): path for path in data}
    folders = (target.parent, target.parent.parent)
    others = (path for folder in folders for path in _files_in(folder) if path not in {target, *data})
    return {names[name] for path in others for name in _names_within(path, names)}


def _files_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:  # a folder may be written and not be read
        return []


def _names_within(file: Path, names: Iterable[bytes]) -> list[bytes]:
    """The names that a file holds, which is read only where it may be a model: it begins as one, or is small."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            begins = opened.read(1) == IR_VERSION
            if not size or not (size <= _ANY_FILE or (begins and size < 2**31)):
                return []
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return [name for name in names if content.find(name) >= 0]
    except (OSError, ValueError):  # what cannot be read may name them all
        return list(names)


def _relocate(file: Path, name: str) -> None:
    """Let the weights of a model, which all lie in one file beside it, be read from a file of this name."""
    proto = onnx.load(file, load_external_data=False)
    entries = [entry for entry in _location_entries(proto.graph) if entry.value != name]
    for entry in entries:
        entry.value = name
    if entries:
        onnx.save(proto, file)


def _files_of(file: Path) -> set[Path]:
    """The files that hold the weights of a model file; none where it cannot be read."""
    if not os.path.isfile(file):  # noqa: PTH113 - a pipe would wait for ever; Path.is_file raises for a name too long
        return set()
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"location") < 0:  # the key of each entry: what has none need not be parsed
                return set()
        entries = _location_entries(onnx.load(file, load_external_data=False).graph)
        return {(file.parent / entry.value).resolve() for entry in entries}
    except Exception:  # noqa: BLE001 - whatever the parser says that the suffix chooses
        return set()


def _location_entries(graph: onnx.GraphProto) -> Iterator[onnx.StringStringEntryProto]:
    for tensor in graph.initializer:
        yield from (entry for entry in tensor.external_data if entry.key == "location")
    for node in graph.node:
        for attribute in node.attribute:
            for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _location_entries(body)


def check_valid(model: onnx.ModelProto | Path, what: str) -> None:
    """Raise FormatError, which begins with `what`, for a model that neither onnx.checker nor ONNX Runtime takes.

    The checker asks for more: a shape of each output, a name of the graph. A model that came without stays so.
    """
    try:
        onnx.checker.check_model(os.fspath(model) if isinstance(model, Path) else model)
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        if not _loads(model):
            raise FormatError(f"{what}: {one_line(error)}") from error


def _loads(model: onnx.ModelProto | Path) -> bool:
    """Return True where ONNX Runtime takes a model."""
    with suppress(Exception):  # also where it is not installed
        import onnxruntime  # only where the checker refuses

        options = session_options()
        options.log_severity_level = 4
        source = os.fspath(model) if isinstance(model, Path) else model.SerializeToString()
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return True
    return False
