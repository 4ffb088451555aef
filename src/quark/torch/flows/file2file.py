"""Safetensors shards in, quantized safetensors shards out, without a model that holds weights.

A skeleton on the meta device says which tensor belongs to which layer; from it come the plan, the shards, their headers
and the place of every tensor. Then each tensor is read, quantized and written to its place on its own, in any order, by
any number of threads and processes. The files are those that `quantize_model` and `export_safetensors` write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from quark.base.files import check_apart
from quark.base.log import logger
from quark.base.progress import progress
from quark.core.checks import naming
from quark.core.spec import TensorSpec
from quark.errors import ConfigError
from quark.torch.calibration.calibrate import qparams_under, sharing_scales, tensor_qparams
from quark.torch.calibration.distributed import check_alive, check_devices, rank, world
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.checkpoint.safetensors_file import ByteRange, write_across
from quark.torch.checkpoint.shards import Entry
from quark.torch.checkpoint.sources.origins import Origin
from quark.torch.checkpoint.sources.source import Source
from quark.torch.config.config import QConfig
from quark.torch.flows.checkpoint_job import CheckpointJob, Contents, create_files
from quark.torch.flows.predicted_size import FolderPlan
from quark.torch.flows.preflight import Estimate, preflight
from quark.torch.flows.replaced import replaced
from quark.torch.formats.fused_groups import sibling_groups
from quark.torch.formats.layout import Layout, Tensors
from quark.torch.layers import QuantLayer
from quark.torch.plan import Plan
from quark.torch.writers import by_rows
from quark.torch.writers.by_rows import RowsOfWeight, Way, copy_pieces, ways_of
from quark.torch.writers.folder import QUARK
from quark.torch.writers.writer import Move, OutputTarget, Writer
from quark.torch.writers.written_into import written_into


@dataclass(frozen=True)
class TensorJob:
    """One tensor to convert.

    Attributes:
        name: In the model.
        source: Where it lies in the source checkpoint.
        dtype, shape: Of the float tensor in the model.
        spec: How it is quantized; None: it is stored as it is.
        ways: What becomes of its stored tensors, by their suffixes, and where they go.
        layout: How these are stored, where it is quantized.
        make: Makes what is stored of a tensor that lies in the source under no name of its own.
    """

    name: str
    source: Origin
    dtype: torch.dtype
    shape: tuple[int, ...]
    spec: TensorSpec | None
    ways: Mapping[str, Way]
    layout: Layout | None = None
    make: Callable[[], Tensors] | None = None

    def write(self, tensors: Tensors) -> None:
        """Write its stored tensors, or some of them."""
        for suffix, tensor in tensors.items():
            move, places = self.ways[suffix]
            write_across(move(tensor), places)


_MOST_WORKERS = 4
"""More would hold more tensors at once than reading and writing keep busy."""

FLOATS_OF_A_VALUE = 4
"""Arrays in float32 of what is converted at once that are alive together."""

Family = tuple[TensorJob, ...]
"""Tensors that share a second-level scale, or one alone: what a worker takes at once."""


@dataclass(frozen=True)
class Conversion:
    """The data that every worker needs: where tensors come from."""

    files: list[Path]
    quantization: dict[str, Any] | None


def quantize_files(
    config: QConfig,
    source: OpenedFolder | Path,
    output: Path,
    *,
    devices: list[str],
    workers: int | None = None,
    overwrite: bool | None = False,
    keep_unexpected: bool = False,
    target: OutputTarget = QUARK,
    plan: FolderPlan | None = None,
) -> None:
    """Quantize a checkpoint folder into another.

    Args:
        config: Weights, and activations that are dynamic or float.
        source: Folder of a checkpoint, float or one that is read as float.
        output: Folder or file to make; it appears when all of it is written.
        devices: Where the arithmetic runs; each gets `workers` threads.
        workers: Threads per device, each of which holds a tensor or two; None: one, and for the CPU as many as torch
            has threads, at most _MOST_WORKERS.
        overwrite: As for `export_safetensors`.
        keep_unexpected: As for `load_float_model`.
        target: What it becomes.
        plan: As for `CheckpointJob`.

    Raises:
        OutputExistsError: `output` is, holds or lies in the source; or see `quark.base.files.check_folder`.
        ConfigError: An activation is static, or an algorithm was asked for: both need data. Or several processes share
            a GPU.
        FormatError: The source is incomplete or corrupt.
        NonFiniteError, ShapeError: See there; each names the tensor.
    """
    check_devices(devices)
    source = OpenedFolder.of(source)
    check_apart(output, source.path, whole=not target.is_file)
    job = CheckpointJob(config, source, target, keep_unexpected, plan=plan)
    _refuse_data(config, job.plan)
    conversion = Conversion(job.files, job.quantization)
    with (
        own_arithmetic(),
        written_into(output, overwrite, target.is_file) as made,
        replaced(job.model, job.plan) as layers,
    ):
        contents = job.contents()
        writer = contents.writer
        places = create_files(writer, made)
        items = [item for entry in contents.entries for item in _tensor_jobs(entry, contents, layers, places)]
        items += [_carried_job(entry, writer, job, places) for entry in writer.carried]
        groups = sibling_groups(job.model, config.shared_scale_groups)
        if rank() == 0:
            size = sum(place.length for place in places.values())
            workers = _workers(devices, workers)
            needed = Estimate(len(items), _largest(items) * workers * len(devices), 0, 0, size, unit="tensors")
            preflight(needed, made, None, "fewer workers", written=True)
        _run(conversion, _share(_families(items, groups), job.checkpoint, rank(), world()), devices, workers)
        if rank() == 0:
            writer.write_rest(made)
    logger.info("Quantized %s to %s.", source.path, output)


def _workers(devices: list[str], asked: int | None) -> int:
    """How many threads each device gets."""
    if asked is not None:
        return asked
    return min(torch.get_num_threads(), _MOST_WORKERS) if devices == ["cpu"] else 1


def _largest(items: Sequence[TensorJob]) -> int:
    """Bytes of memory that the largest tensor takes, or those of its rows that are converted at once."""
    largest = 0
    for item in items:
        size, rows = math.prod(item.shape), None
        if item.spec is None:
            largest = max(largest, min(size * item.dtype.itemsize, by_rows.PIECE))
            continue
        if item.layout is not None:
            rows = RowsOfWeight.of(item.layout, item.spec, item.shape, item.dtype, item.ways)
        part = size if rows is None else size // item.shape[0] * rows.step
        largest = max(largest, FLOATS_OF_A_VALUE * 4 * part + size * item.dtype.itemsize * (rows is None))
    return largest


def _refuse_data(config: QConfig, plan: Plan) -> None:
    """Raise ConfigError for what needs the model to run."""
    why = "file to file never runs the model. Possible: a weight-only or dynamic scheme, or quantize_model with data."
    if config.algo_config:
        names = ", ".join(type(algorithm).__name__ for algorithm in config.algo_config)
        raise ConfigError(f"algo_config ({names}) needs calibration data, and {why}")
    for name in ("kv_cache_quant_config", "softmax_quant_spec"):
        if getattr(config, name):
            raise ConfigError(f"{name} needs calibration data, and {why}")
    for name, spec in plan.layers.items():
        for role in ("input", "output"):
            tensor = getattr(spec, role)
            if tensor is not None and tensor.needs_calibration:
                raise ConfigError(f"{name}.{role} ({tensor}) has a static scale, which needs calibration data: {why}")


def _tensor_jobs(
    entry: Entry, contents: Contents, layers: Mapping[str, QuantLayer], places: Mapping[str, ByteRange]
) -> list[TensorJob]:
    name, _, shapes = entry
    if name in contents.copied:
        return [
            TensorJob(
                file, Origin((source,)), shapes[file].dtype, tuple(shapes[file].shape), None,
                {"": (Move((file,)), [places[file]])},
            )
            for file, source in contents.copied[name].items()
        ]  # fmt: skip
    parent, _, leaf = name.rpartition(".")
    source, writer = contents.sources.get(name, Origin((name,))), contents.writer
    stored = ways_of(entry, writer, places)
    layer = layers.get(parent)
    if layer is None:
        return [TensorJob(name, source, shapes[""].dtype, tuple(shapes[""].shape), None, stored)]
    x: torch.Tensor = getattr(layer, leaf)
    spec: TensorSpec | None = getattr(layer.spec, leaf, None)
    layout = None if spec is None else writer.layout(spec, layer.spec, x.dtype)
    return [TensorJob(name, source, x.dtype, tuple(x.shape), spec, stored, layout)]


def _carried_job(entry: Entry, writer: Writer, job: CheckpointJob, places: Mapping[str, ByteRange]) -> TensorJob:
    """The job of a tensor that the class of the model does not build."""
    name, make, shapes = entry
    stored = ways_of(entry, writer, places)
    if name not in {*job.checkpoint.names()}:
        like = shapes[""]
        return TensorJob(name, Origin((name,)), like.dtype, tuple(like.shape), None, stored, make=make)
    parent, _, leaf = name.rpartition(".")
    layer = job.plan.beside.get(parent) if leaf == "weight" else None
    if layer is None or layer.weight is None:
        return TensorJob(name, Origin((name,)), shapes[""].dtype, job.checkpoint.shape(name), None, stored)
    layout, dtype = writer.layout(layer.weight, layer, job.model.dtype), job.model.dtype
    return TensorJob(name, Origin((name,)), dtype, job.checkpoint.shape(name), layer.weight, stored, layout)


def _families(items: list[TensorJob], groups: Sequence[Sequence[str]]) -> list[Family]:
    """The items, those together that share a scale, in the order of the model."""
    weights = {item.name.removesuffix(".weight"): item for item in items if item.spec and item.name.endswith(".weight")}
    specs = {name: item.spec for name, item in weights.items() if item.spec}
    sharing = [[weights[name] for name in names] for names in sharing_scales(specs, groups)]
    first = {members[0].name: tuple(members) for members in sharing}
    rest = {item.name for members in sharing for item in members[1:]}
    return [first.get(item.name, (item,)) for item in items if item.name not in rest]


def _share(families: list[Family], source: Source, own: int, size: int) -> list[Family]:
    """Return the families that process `own` of `size` converts: neighbours in the source, a like share of bytes.

    So each process reads a part of the files in their order, and few files are read by two.
    """
    if not families:
        return []
    order = {name: position for position, name in enumerate(source.names())}
    families = sorted(families, key=lambda family: order.get(family[0].source.names[0], len(order)))
    ends = list(itertools.accumulate(sum(math.prod(item.shape) * item.dtype.itemsize for item in f) for f in families))
    # By the middle of each family, in whole numbers: none is left out, none is taken twice.
    middles = [begin + end for begin, end in itertools.pairwise([0, *ends])]
    whole = max(1, 2 * ends[-1])
    return [f for f, middle in zip(families, middles, strict=True) if min(middle * size // whole, size - 1) == own]


def _run(conversion: Conversion, families: list[Family], devices: list[str], workers: int | None) -> None:
    """Convert all families, in this thread or in one for each worker.

    Nearly all of the work is done without Python's lock: reading pages, arithmetic, writing. Processes would spend more
    on importing torch than a thread on several gigabytes.
    """
    workers = _workers(devices, workers)
    converters = [Converter(conversion, device) for device in devices * workers]
    if len(converters) == 1:
        for family in progress(families, "tensors", total=len(families)):
            check_alive()
            converters[0](family)
        return
    idle: SimpleQueue[Converter] = SimpleQueue()
    for converter in converters:
        idle.put(converter)

    def work(family: Family) -> None:
        converter = idle.get()
        try:
            converter(family)
        finally:
            idle.put(converter)

    threads = torch.get_num_threads()
    each = max(1, threads // len(converters))
    pool = ThreadPoolExecutor(len(converters), "converter", torch.set_num_threads, (each,))
    try:
        done = [pool.submit(work, family) for family in families]
        for future in progress(done, "tensors", total=len(done)):
            check_alive()
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # theirs is the default of threads to come


class Converter:
    """Reads, quantizes and writes families of tensors."""

    def __init__(self, conversion: Conversion, device: str) -> None:
        self.conversion = conversion
        self.device = torch.device(device)
        self.source = Source(conversion.files, conversion.quantization)

    def __call__(self, family: Family) -> None:
        """Convert and write one family."""
        largest = None
        if len(family) > 1:
            largest = torch.stack([self._second_scale(item) for item in family]).amax(0)
        for item in family:
            if item.make is not None:
                item.write(item.make())
                continue
            if item.spec is None:
                x = item.source.read(self.source, item.dtype, item.shape)
                copy_pieces(x, item.ways[""], partial(item.source.release, self.source))
                continue
            if largest is None and self._converts_by_rows(item, item.spec):
                continue
            item.write(self._convert(item, item.spec, largest))
            item.source.release(self.source)

    def _converts_by_rows(self, item: TensorJob, spec: TensorSpec) -> bool:
        """Convert and write a tensor some rows at a time; whether it was done, see `RowsOfWeight`."""
        assert item.layout is not None
        rows = RowsOfWeight.of(item.layout, spec, item.shape, item.dtype, item.ways)
        release = partial(item.source.release, self.source)
        if rows is None or self.device.type != "cpu":
            return False
        return rows.write(self._read_tensor(item), partial(tensor_qparams, spec=spec), release)

    def _convert(self, item: TensorJob, spec: TensorSpec, largest: torch.Tensor | None) -> Tensors:
        x, layout = self._read_tensor(item), item.layout
        assert layout is not None
        with naming(item.name):
            if spec.is_cast:
                return layout.store(x, None)
            if largest is not None:
                return layout.store(x, qparams_under(largest, x, spec))
            return layout.store(x, tensor_qparams(x, spec))

    def _second_scale(self, item: TensorJob) -> torch.Tensor:
        assert item.spec is not None
        with naming(item.name):
            params = tensor_qparams(self._read_tensor(item), item.spec)
        assert params.second is not None
        item.source.release(self.source)
        scale: torch.Tensor = params.second.scale
        return scale

    def _read_tensor(self, item: TensorJob) -> torch.Tensor:
        return item.source.read(self.source, item.dtype, item.shape).to(self.device)
