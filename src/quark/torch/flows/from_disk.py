"""Quantizes a checkpoint folder block by block from disk: memory holds the embeddings, two blocks and their inputs.

Shards are made with their headers and full size, and each finished block is written to its places. After each block a
manifest says what is done, and the inputs of the next block lie beside it: the same call after a run that was killed
goes on there, and gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.base.files import check_apart, check_file, check_folder, check_place, final_place, move_file, move_folder
from quark.base.log import logger, severity
from quark.base.memory_and_disk import give_back_memory
from quark.base.progress import progress, status
from quark.core.checks import all_finite, check, naming
from quark.core.scales import QParams
from quark.errors import FormatError, OutputError, QuarkError
from quark.torch.algorithms import algorithms_of
from quark.torch.algorithms.base import Algorithm
from quark.torch.algorithms.block_loop import LoopState, is_inside, is_outside
from quark.torch.algorithms.layer_weights import weight_quantizer
from quark.torch.calibration.calibrate import calibrate_tensor, calibrate_weights, not_finite_error
from quark.torch.calibration.device_memory import filled_a_device, halves_of, with_smaller_batches
from quark.torch.calibration.distributed import check_devices, first_then_all, rank, require_shared, wait, world
from quark.torch.calibration.reached import check_reached
from quark.torch.calibration.surroundings import own_arithmetic
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.flows.checkpoint_job import CheckpointJob, Contents, create_files
from quark.torch.flows.per_block import blocks_without_weights, observed_tensors, quantize_blocks, refuse_whole
from quark.torch.flows.predicted_size import FolderPlan
from quark.torch.flows.preflight import estimate, preflight
from quark.torch.flows.replaced import attention_quantized, replaced
from quark.torch.flows.resume import MODEL, Manifest, fingerprint_of_data, fingerprint_of_files, in_use
from quark.torch.flows.weights_on_disk import OnDisk, WeightsOnDisk, in_folder
from quark.torch.layers import QuantLayer
from quark.torch.layers.attention.probabilities import forget_ranges
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.meta_model import fill_buffers
from quark.torch.writers import by_rows
from quark.torch.writers.by_rows import RowsOfWeight, copy_pieces, ways_of
from quark.torch.writers.folder import QUARK
from quark.torch.writers.writer import OutputTarget

HOW_IT_RAN = ("shared_scale_groups", "sync_moe_expert_input_amax", "calibrate_all_experts")
"""Fields of a config that change the result and are no part of its record."""


def stream(
    config: QConfig,
    source: OpenedFolder | Path,
    output: Path,
    data: Iterable[Any] | None = None,
    *,
    device: str = "cpu",
    overwrite: bool = False,
    work: Path | None = None,
    keep_unexpected: bool = False,
    target: OutputTarget = QUARK,
    plan: FolderPlan | None = None,
) -> None:
    """Quantize a checkpoint folder into another.

    Args:
        config: As for `ModelQuantizer`.
        source: Folder of a checkpoint, float or one that is read as float.
        output: Folder or file to make; it appears when all of it is written.
        data: Calibration batches, where activations are static or an algorithm needs them.
        device: Where blocks run.
        overwrite: As for `export_safetensors`.
        work: Folder of the unfinished run, which goes on; default: `output` with ".partial" after its name.
        keep_unexpected: As for `load_float_model`.
        target: What it becomes.
        plan: As for `CheckpointJob`.

    Raises:
        OutputExistsError: `output` is, holds or lies in the source; or see `quark.base.files.check_folder`.
        ConfigError: `work` belongs to a run with other settings; says which differs. Or several processes share a GPU.
        FormatError: The source, or what `work` holds, is incomplete or corrupt.
        OutputError: Of several processes, one does not see `work`.
        CalibrationError, NonFiniteError, ShapeError, NotSupportedError: See there; each names the tensor or layer.
    """
    check_devices([device])
    source = OpenedFolder.of(source)
    check_apart(output, source.path, whole=not target.is_file)
    (check_file if target.is_file else check_folder)(output, overwrite)
    job = CheckpointJob(config, source, target, keep_unexpected, data, plan)
    batches = None if data is None else list(calibration_data(job.model, data) or ())
    refuse_whole(algorithms_of(config.algo_config or []))
    work = check_place(output.with_name(f"{output.name}.partial"), overwrite=True) if work is None else work.resolve()
    check_apart(work, source.path, whole=not target.is_file)
    with_smaller_batches(partial(_write, job, target, output, work, torch.device(device)), batches)
    logger.info("Quantized %s to %s.", source.path, output)


def _write(
    job: CheckpointJob, target: OutputTarget, output: Path, work: Path, device: torch.device, batches: list[Any] | None
) -> None:
    """Quantize a folder, see `stream`, on these batches."""
    config = job.config
    settings = _settings(config, target, [job.folder.path / "config.json", *job.files], batches)
    with (
        own_arithmetic(),
        replaced(job.model, job.plan) as layers,
        attention_quantized(job.model, config, job.plan, layers),
        in_use(work),
        severity(config.log_severity_level if config.log_severity_level != 1 else None),
    ):
        require_shared(work)
        contents = job.contents()
        check_reached(job.model, layers, batches)
        manifest = first_then_all(lambda first: Manifest.open(work, settings))
        if manifest.begun:
            logger.info("Going on from %s, where %d blocks are finished.", work, manifest.finished)
        with _named(work), _kept_if_begun(manifest, batches):
            made = manifest.folder / MODEL / output.name if target.is_file else manifest.folder / MODEL
            run = _Run(job, contents, layers, manifest, made, device)
            run.quantize(algorithms_of(config.algo_config or []), batches)
            wait()
            if rank() == 0:
                contents.writer.write_rest(made)
                (move_file if target.is_file else move_folder)(made, output)
                manifest.remove()
        wait()


@contextmanager
def _kept_if_begun(manifest: Manifest, batches: list[Any] | None) -> Iterator[None]:
    """Remove the folder of a run that fails before a block is finished, of which the files are damaged, or which begins
    again on smaller batches: nothing can go on from there.
    """
    try:
        yield
    except Exception as error:
        again = world() == 1 and filled_a_device(error) and batches is not None and halves_of(batches) is not None
        if rank() == 0 and (not manifest.begun or again or isinstance(error, FormatError)):
            manifest.remove()
        elif rank() == 0:
            _say_kept(manifest)
        raise
    except KeyboardInterrupt:
        if rank() == 0:
            _say_kept(manifest) if manifest.begun else manifest.remove()
        raise


@contextmanager
def _named(work: Path) -> Iterator[None]:
    """Raise OutputError, which names the file or the folder of the run, in the place of an OSError of the body."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QuarkError):
            raise
        place = final_place(error.filename or work)
        raise OutputError(f"Could not write {place}: {error.strerror or error}.") from error


def _say_kept(manifest: Manifest) -> None:
    """Log that the same call goes on where this one stopped, and what is kept for it."""
    if manifest.begun:
        logger.warning(
            "%d blocks are finished, and kept in %s: the same command goes on from there. To begin again, remove it.",
            manifest.finished, manifest.folder,
        )  # fmt: skip


def _settings(
    config: QConfig, target: OutputTarget, files: Sequence[Path], batches: list[Any] | None
) -> dict[str, Any]:
    """Return the settings that a run that goes on must share with the one that began."""
    return {
        "config": {**config.to_dict(), **{name: getattr(config, name) for name in HOW_IT_RAN}},
        **target.settings,
        "model": fingerprint_of_files(files),
        "calibration data": fingerprint_of_data(batches),
        "processes": world(),
    }


class _Run:
    """One run of a job: its manifest, and where its tensors come from and go."""

    def __init__(
        self,
        job: CheckpointJob,
        contents: Contents,
        layers: Mapping[str, QuantLayer],
        manifest: Manifest,
        output: Path,
        device: torch.device,
    ) -> None:
        self.job, self.model, self.layers, self.manifest, self.output = job, job.model, layers, manifest, output
        writer = contents.writer
        self.writer = writer
        self.weights = FromDisk(job.model, in_folder(contents.sources, contents.ties, job.checkpoint), device)
        self.places = create_files(writer, output, manifest.begun)
        self.dropped = {name: make for name, make, _ in writer.carried}
        self.planned = {
            name: [key for suffix in shapes for key in writer.move(name, suffix).keys]
            for name, _, shapes in [*contents.entries, *writer.carried]
        }
        if rank() == 0:
            manifest.verify(self.places)
        fill_buffers(job.model)

    def quantize(self, algorithms: Sequence[Algorithm], data: list[Any] | None) -> None:
        """Quantize and write everything that is not written yet."""
        state = self.manifest.state()
        names = blocks_without_weights(self.model, self.layers, algorithms, data, self.weights)
        if rank() == 0:
            size = sum(place.length for place in self.places.values())
            observes = bool(observed_tensors(self.model, self.layers, algorithms))
            needed = estimate(self.model, size, algorithms, data, whole=False, observes=observes, names=names)
            # Of a run that goes on, a part is written already.
            preflight(replace(needed, output=0) if self.manifest.begun else needed, self.output, data, "fewer samples")
        work = self.manifest.folder
        config = self.job.config
        quantize_blocks(
            self.model, self.layers, algorithms, data, config, self.weights, self._finish, state, work, names
        )
        if rank() > 0:
            return
        outside = [name for name in self.planned if is_outside(name, names)]
        self._write_outside(outside, algorithms)

    def _write_outside(self, names: Sequence[str], algorithms: Sequence[Algorithm]) -> None:
        """Quantize and write what lies in no block."""
        parents_of = [*dict.fromkeys(name.rpartition(".")[0] for name in names)]
        for parent in progress(parents_of, "layers outside the blocks", len(parents_of)):
            own = {name for name in names if name.rpartition(".")[0] == parent}
            for name in own & self.dropped.keys():
                self.writer.put(name, self.dropped[name](), self.places)
            if not (own := own - self.dropped.keys()):
                continue
            if parent not in self.layers:
                own -= self._copied(own)
            # What files hold in one tensor may lie in several modules.
            members = (name for form in self.writer.forms if form.members[0] in own for name in form.members)
            parents = dict.fromkeys((parent, *(name.rpartition(".")[0] for name in members)))
            if parent in self.layers and self._writes_by_rows(f"{parent}.weight", self.layers[parent], algorithms):
                own.discard(f"{parent}.weight")
            if own:
                self._write_whole(parent, own, parents, algorithms)

    def _copied(self, own: set[str]) -> set[str]:
        """Write the tensors of a float module that lie in the files as they are, some bytes at a time; their names."""
        joined = {name for form in self.writer.forms for name in form.members}
        there = own & self.weights.sources.keys() - joined
        for name, _, shapes in [*self.writer.entries(there)]:
            source = self.weights.sources[name]
            move = self.writer.move(name, "")
            copy_pieces(source.read(shapes[""]), (move, [self.places[key] for key in move.keys]), source.release)
        return there

    def _write_whole(self, parent: str, own: set[str], parents: Iterable[str], algorithms: Sequence[Algorithm]) -> None:
        """Quantize and write some tensors of a module outside the blocks, and what files hold with them.

        Args:
            parent: The module.
            own: The tensors.
            parents: The modules whose tensors files hold in one with these, itself among them.
            algorithms: That may find scales.
        """
        for each in parents:
            self.weights.bring(each, recurse=False)
        if parent in self.layers:
            for algorithm in algorithms:
                algorithm.on_weights({parent: self.layers[parent]})
            calibrate_weights({parent: self.layers[parent]})
        self._write(own)
        for each in parents:
            self.weights.take(each)

    def _writes_by_rows(self, name: str, layer: QuantLayer, algorithms: Sequence[Algorithm]) -> bool:
        """Quantize and write the weight of a layer some rows at a time; whether it was done, see `RowsOfWeight`."""
        entry = next(self.writer.entries({name}), None)
        if entry is None or layer.spec.weight is None or self.weights.device != torch.device("cpu"):
            return False
        weight, quantizer = layer.float_weight, weight_quantizer(layer)
        layout, shape = self.writer.layout(layer.spec.weight, layer.spec, weight.dtype), tuple(weight.shape)
        ways = ways_of(entry, self.writer, self.places)
        rows = RowsOfWeight.of(layout, layer.spec.weight, shape, weight.dtype, ways)
        if rows is None or quantizer.params is not None:
            return False
        parent, seen = name.rpartition(".")[0], 0

        def qparams(some: torch.Tensor) -> QParams:
            nonlocal seen
            status(f"{name}, row {seen} of {len(weight)}")
            seen += len(some)
            quantizer.forget()
            self.weights.put(name, some)
            for algorithm in algorithms:
                algorithm.on_weights({parent: layer})
            calibrate_tensor(name, some, quantizer)
            return cast(QParams, quantizer.params)

        source = self.weights.sources[name]
        try:
            return rows.write(source.read(weight), qparams, source.release)
        finally:
            self.weights.take(parent)

    def _finish(self, block: str, state: LoopState) -> None:
        own = {name for name in self.planned if is_inside(name, block)}
        self._write(own)
        written = [stored for name in own for stored in self.planned[name]]
        self.manifest.finish(block, {name: self.places[name] for name in written}, state)

    def _write(self, names: set[str]) -> None:
        if rank() > 0:
            return
        for name, make, _ in self.writer.entries(names):
            self.writer.put(name, make(), self.places)


class FromDisk(WeightsOnDisk):
    """Brings the float weights of a module from a checkpoint; takes them away with all that quantizing left there."""

    tables_in_file = True

    def __init__(self, model: nn.Module, sources: Mapping[str, OnDisk], device: torch.device) -> None:
        super().__init__(model, sources, device)
        self._checked: set[str] = set()

    def show(self, name: str, table: nn.Embedding) -> None:
        """Put a table in place, over its file, as rows of it are looked up.

        Raises:
            NonFiniteError: It is quantized, and holds NaN or infinity.
        """
        super().show(name, table)
        if not isinstance(table, QuantLayer) or table.spec.weight is None:
            return
        for full, x in self.own(name, False):
            if full in self._checked:
                continue
            self._checked.add(full)
            with naming(full):
                for rows in torch.split(x, max(1, by_rows.PIECE // max(1, x[:1].nbytes))):
                    check(all_finite(rows), partial(not_finite_error, x))
                    self.sources[full].release()

    def take(self, name: str) -> None:
        """Leave the module as it was before it was brought."""
        super().take(name)
        module = self.model.get_submodule(name)
        for layer in module.modules():
            if isinstance(layer, QuantLayer):
                layer.attach(layer.spec)
        forget_ranges(module)
        give_back_memory()
