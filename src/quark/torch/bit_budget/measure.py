"""Measures the sensitivity of a model, in memory or in a folder, of which one block at a time is loaded then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.core.patterns import first_match
from quark.core.schemes import SCHEMES
from quark.core.spec import LayerSpec
from quark.errors import CalibrationError, ConfigError, NotSupportedError, ShapeError
from quark.torch.algorithms.block_loop import BlockWeights
from quark.torch.bit_budget.sensitivity import AlikeLayers, SensitivityTable
from quark.torch.bit_budget.sweep import Sweep, Swept
from quark.torch.bit_budget.tape import Tape
from quark.torch.calibration.distributed import world
from quark.torch.checkpoint.loading import REAL_QUANTIZED
from quark.torch.checkpoint.shards import predicted_bytes, stored_bytes
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate
from quark.torch.config.lowering import lower_layer
from quark.torch.flows.checkpoint_job import CheckpointJob
from quark.torch.flows.from_disk import FromDisk
from quark.torch.flows.resume import fingerprint_of_data, fingerprint_of_files, in_use
from quark.torch.formats import FORMATS, Format
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.folder_files import shard_files
from quark.torch.model.meta_model import fill_buffers
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.plan import Plan, check_shapes, make_plan
from quark.torch.replace import prepared

CANDIDATES = {
    "quark": ("int3_wo_128", "uint4_wo_128", "uint4_wo_64", "uint4_wo_32", "int8_wo"),
    "compressed-tensors": ("int2_wo_64", "int3_wo_128", "uint4_wo_128", "uint4_wo_64", "uint4_wo_32", "int8_wo"),
}
"""Formats whose config.json says what each layer has -> what is chosen from by default: each the best at its size. The
quark format stores a value of int2 in 32 bits."""
FITS_ALL = "int8_wo"
"""A scheme that fits every linear layer: the plan under it says which layers there are to choose for."""


def measure_sensitivity(
    model: nn.Module | str | Path,
    data: Iterable[Any],
    candidates: Sequence[str] | None = None,
    config: QConfig | None = None,
    *,
    export_format: str = "quark",
    device: str = "cpu",
    work: str | Path | None = None,
) -> SensitivityTable:
    """Measure what each layer loses under each candidate: two passes over the data, one block at a time.

    Args:
        model: A float model in float32 or bfloat16, or a folder, of which one block at a time is loaded, in float32.
        data: Batches as `quantize_model` takes them; some thousand tokens are enough.
        candidates: Names of schemes, of weights alone or with dynamic inputs. Default: those of the format in
            `CANDIDATES`.
        config: What is excluded (`exclude`); layers that its `layer_quant_config` names keep what it says. Default:
            that of `LLMTemplate`.
        export_format: Whose bytes are counted: a name in `CANDIDATES`.
        device: Where blocks of a folder run.
        work: Folder for what the first pass leaves for the second: a run that was killed goes on there. Default: in
            memory, as several processes must (within `processes()`).

    Raises:
        ConfigError: An unknown candidate, or one with static activations; `work` is of another run.
        NotSupportedError: The model has no list of blocks, or no logits; other layers than linear ones.
        CalibrationError, ShapeError, NonFiniteError: See there; each names the layer.
    """
    form = mixed_format(export_format)
    specs = {name: _candidate(name, form) for name in (CANDIDATES[export_format] if candidates is None else candidates)}
    if len(specs) < 2:
        raise ConfigError(f"A choice needs two candidates at least, got {', '.join(specs) or 'none'}.")
    if world() > 1 and work is not None:
        raise NotSupportedError(
            f"work={str(work)!r}: several processes keep what they measure in memory. Possible: none."
        )
    base = replace(config or LLMTemplate.get("auto").get_config(FITS_ALL), global_quant_config=_plan_scheme())
    in_memory = isinstance(model, nn.Module)
    batches = list(calibration_data(model, data) or ()) if isinstance(model, nn.Module) else list(data)
    if not batches:
        raise CalibrationError("The calibration data are empty: at least one batch is needed.")
    folder = None if work is None else Path(work)
    with torch.inference_mode(False), in_use(folder) if folder is not None else nullcontext():
        measured = _in_memory if in_memory else _on_disk
        return measured(cast(Any, model), batches, specs, base, torch.device(device), folder, form)


def mixed_format(name: str) -> Format:
    """The format of a name. Raises NotSupportedError for one that is a file or holds one scheme."""
    if name not in CANDIDATES:
        raise NotSupportedError(
            f"Bits for a budget are not counted in the format {name}. Possible: {', '.join(CANDIDATES)}."
        )
    return FORMATS[name]


def settings_of_folder(folder: Path, config: QConfig, export_format: str) -> str:
    """What a table of sensitivities is of: the folder, what is excluded or has a scheme of its own, the format."""
    stored = config.to_dict()
    kept = [stored[name] for name in ("exclude", "layer_quant_config")]
    files = fingerprint_of_files([folder / "config.json", *shard_files(folder)])
    return hashlib.sha256(json.dumps([files, kept, export_format]).encode()).hexdigest()


def _plan_scheme() -> Any:
    return LLMTemplate.scheme(FITS_ALL)


def _candidate(name: str, form: Format) -> LayerSpec:
    spec = SCHEMES[name] if name in SCHEMES else lower_layer(LLMTemplate.scheme(name))
    if spec.needs_data or spec.output is not None or spec.bias is not None:
        raise ConfigError(
            f"The candidate {name!r} has static activation scales, whose error is not measured. Possible: schemes of "
            f"weights, or with dynamic inputs: {', '.join(CANDIDATES[form.name])} ..."
        )
    reason = form.refusal(spec)
    if reason:
        raise NotSupportedError(f"The {form.name} format cannot hold {reason} ({name}). {form.possible()}")
    return spec


def _in_memory(
    model: nn.Module,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    _: Any,
    folder: Path | None,
    form: Format,
) -> SensitivityTable:
    half = next((name for name, p in model.named_parameters() if p.dtype == torch.float16), None)
    if half is not None:
        raise ConfigError(
            f"{half} is float16, in which gradients vanish. Possible: load the model in float32 or bfloat16, or give "
            "its folder."
        )
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(f"{name} {fingerprint_of_data([tensor])}".encode())
    with prepared(model, config):
        plan = make_plan(config, model, read_elsewhere=weights_read_elsewhere(model, data))
        return _measure(model, plan, data, specs, config, state.hexdigest(), folder, BlockWeights, form)


def _on_disk(
    source: str | Path,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    device: torch.device,
    folder: Path | None,
    form: Format,
) -> SensitivityTable:
    options = {"weight_format": REAL_QUANTIZED, "pack_method": "reorder", "max_shard_size": "5GB"}
    job = CheckpointJob(config, Path(source), **options)

    def weights() -> BlockWeights:
        contents = job.contents()
        job.model.float()
        found = FromDisk(job.model, job.checkpoint, contents.sources, contents.ties, device)
        fill_buffers(job.model)
        return found

    return _measure(
        job.model,
        job.plan,
        data,
        specs,
        config,
        settings_of_folder(Path(source), config, form.name),
        folder,
        weights,
        form,
    )


def _measure(
    model: nn.Module,
    plan: Plan,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    fingerprint: str,
    folder: Path | None,
    weights: Callable[[], BlockWeights],
    form: Format,
) -> SensitivityTable:
    """The table; sizes are taken before `weights` may change the dtype of the model."""
    names = [name for name in plan.layers if first_match(name, config.layer_quant_config) is None]
    if not names:
        raise ConfigError("layer_quant_config names all layers: there is nothing to choose.")
    for name in names:
        if not isinstance(model.get_submodule(name), nn.Linear):
            kind = type(model.get_submodule(name)).__name__
            raise NotSupportedError(f"{name} is a {kind}; schemes are chosen for linear layers. Possible: exclude it.")
    chosen = {name: cast(nn.Linear, model.get_submodule(name)) for name in names}
    layers = {name: [_fitting(name, layer, spec) for spec in specs.values()] for name, layer in chosen.items()}
    sizes = {
        name: [None if spec is None else _bytes(layer.weight, spec, form) for spec in layers[name]]
        for name, layer in chosen.items()
    }
    rest = predicted_bytes(model, plan, form)
    rest -= sum(_bytes(layer.weight, plan.layers[name], form) for name, layer in chosen.items())
    given = fingerprint_of_data(data)
    assert given is not None
    kept = {"model": fingerprint, "calibration data": given, "candidates": list(specs), "layers": names}
    tape = Tape(folder, kept)
    swept = Sweep(model, layers, data, weights(), tape).run()
    groups = tuple(
        _group(group, {n: chosen[n].weight.numel() for n in group}, list(specs), sizes, swept) for group in swept.groups
    )
    tape.remove()
    return SensitivityTable(fingerprint, given, tuple(specs), groups, rest)


def _fitting(name: str, layer: nn.Linear, spec: LayerSpec) -> LayerSpec | None:
    """The spec, or None where its groups do not fit the layer."""
    try:
        check_shapes(name, type(layer).__name__, tuple(layer.weight.shape), layer.in_features, spec)
    except ShapeError:
        return None
    return spec


def _bytes(weight: torch.Tensor, spec: LayerSpec, form: Format) -> int:
    """What a weight takes in a checkpoint."""
    assert spec.weight is not None
    return stored_bytes(weight, spec.weight, spec, form)


def _group(
    names: Sequence[str],
    weights: Mapping[str, int],
    candidates: Sequence[str],
    sizes: Mapping[str, Sequence[int | None]],
    swept: Swept,
) -> AlikeLayers:
    """One row of the table: what fits all of its layers."""
    size, loss = {}, {}
    for index, candidate in enumerate(candidates):
        bytes_of, losses = ([row[name][index] for name in names] for row in (sizes, swept.losses))
        if None not in bytes_of:
            size[candidate] = sum(cast(list[int], bytes_of))
            loss[candidate] = sum(cast(list[float], losses))
    if not size:
        raise ShapeError(
            f"None of the candidates {', '.join(candidates)} fits {', '.join(names[:3])}. Possible: int8_wo."
        )
    return AlikeLayers(tuple(names), sum(weights.values()), size, loss)
