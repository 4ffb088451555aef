"""Measures the sensitivity of a model, in memory or in a folder, of which one block at a time is loaded then."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quark.base.files import scratch_folder
from quark.core.spec import LayerSpec
from quark.errors import CalibrationError, ConfigError, NotSupportedError, ShapeError
from quark.goals.fused_layers import PROGRAMS
from quark.torch.algorithms.block_weights import BlockWeights, blocks_of
from quark.torch.algorithms.pass_store import PassStore
from quark.torch.bit_budget.rules import BudgetRules, FolderRules, GgufRules
from quark.torch.bit_budget.sensitivity import AskedBudget, LayerGroup, SensitivityTable
from quark.torch.bit_budget.sweep import Sweep, Swept
from quark.torch.calibration.distributed import world
from quark.torch.checkpoint.opened import OpenedFolder
from quark.torch.config.config import QConfig
from quark.torch.config.llm_template import LLMTemplate, default_exclusions
from quark.torch.flows.checkpoint_job import CheckpointJob
from quark.torch.flows.from_disk import FromDisk
from quark.torch.flows.replaced import prepared
from quark.torch.flows.resume import fingerprint_of_data, fingerprint_of_files, in_use
from quark.torch.flows.weights_on_disk import in_folder
from quark.torch.model.blocks.offloading import onloaded
from quark.torch.model.calibration_data import calibration_data
from quark.torch.model.folder_files import shard_files
from quark.torch.model.meta_model import fill_buffers
from quark.torch.model.outside_reads import weights_read_elsewhere
from quark.torch.plan import Plan, make_plan
from quark.torch.writers.folder import QUARK

_TO_5_BITS = ("int3_wo_128", "int3_wo_64", "int3_wo_32", "uint4_wo_128", "uint4_wo_64", "uint4_wo_32")
RULES: dict[str, Callable[[], BudgetRules]] = {
    "quark": partial(FolderRules, "quark", ("uint2_wo_64", *_TO_5_BITS, "mxfp6_e2m3_weight_only", "int8_wo")),
    "compressed-tensors": partial(FolderRules, "compressed-tensors", ("int2_wo_64", *_TO_5_BITS, "int8_wo")),
    "gguf": GgufRules,
}
"""Formats that say what each layer has -> what is chosen from by default: each the best at its size. The quark format
stores a value of int2 in 32 bits; the library of compressed-tensors decodes MX types to bfloat16, whatever the model.
"""
FITS_ALL = "int8_wo"
"""A scheme that fits every linear layer: the plan under it says which layers there are to choose for."""


def measure_sensitivity(
    model: nn.Module | str | Path,
    data: Iterable[Any],
    candidates: Sequence[str] | None = None,
    config: QConfig | None = None,
    *,
    export_format: str = "quark",
    alike: bool | Sequence[str] = True,
    device: str = "cpu",
    work: str | Path | None = None,
    budget: AskedBudget | None = None,
) -> SensitivityTable:
    """Measure what each layer loses under each candidate: two passes over the data, one block at a time.

    Args:
        model: A float model in float32 or bfloat16, or a folder, of which one block at a time is loaded, in float32.
        data: Batches as `quantize_model` takes them; some thousand tokens are enough.
        candidates: Names of schemes, of weights alone or with dynamic inputs; of block types for GGUF. Default: those
            of the format.
        config: What is excluded (`exclude`); layers that its `layer_quant_config` names keep what it says. Default:
            that of `LLMTemplate`; of GGUF nothing, as its files hold the head in a block type too.
        export_format: Whose bytes are counted: a name in `RULES`.
        alike: Whether layers of which a server makes one get one scheme, or the servers that count: "vLLM", "SGLang".
            True: all of them. False, for transformers: each has its own, which loses less. GGUF files always have one
            for each tensor.
        device: Where blocks of a folder run.
        work: Folder for what the first pass leaves for the second, the inputs of all blocks: a run that was killed
            goes on there. Default: for a folder the system's one for temporary files (`TMPDIR`), of which nothing
            stays; for a model in memory, and within `processes()`, memory.
        budget: That the table is for: one that no choice can meet is refused before the data run.

    Raises:
        ConfigError: An unknown candidate, or one with static activations; `work` is of another run; `budget` cannot
            be met.
        NotSupportedError: The model has no list of blocks, or no logits; other layers than linear ones.
        CalibrationError, ShapeError, NonFiniteError: See there; each names the layer.
    """
    rules = mixed_format(export_format, alike)
    specs = {name: rules.spec(name) for name in (rules.candidates if candidates is None else candidates)}
    if len(specs) < 2:
        raise ConfigError(f"A choice needs two candidates at least, got {', '.join(specs) or 'none'}.")
    if world() > 1 and work is not None:
        raise NotSupportedError(
            f"work={str(work)!r}: several processes keep what they measure in memory. Possible: none."
        )
    excluded = [] if isinstance(rules, GgufRules) else default_exclusions("auto")
    given = config or LLMTemplate.get("auto").get_config(FITS_ALL, exclude_layers=excluded)
    base = replace(given, global_quant_config=LLMTemplate.scheme(FITS_ALL))
    in_memory = isinstance(model, nn.Module)
    batches = list(calibration_data(model, data) or ()) if isinstance(model, nn.Module) else list(data)
    if not batches:
        raise CalibrationError("The calibration data are empty: at least one batch is needed.")
    with torch.inference_mode(False), _folder_of_passes(work, in_memory) as folder:
        measured = _in_memory if in_memory else _on_disk
        return measured(cast(Any, model), batches, specs, base, torch.device(device), folder, rules, budget)


@contextmanager
def _folder_of_passes(work: str | Path | None, in_memory: bool) -> Iterator[Path | None]:
    """Within: the folder of what the first pass leaves, or None for memory.

    A model that is loaded block by block can be larger than memory, and the inputs of all its blocks larger yet.
    """
    if work is not None:
        with in_use(Path(work)):
            yield Path(work)
    elif in_memory or world() > 1:
        yield None
    else:
        with scratch_folder(Path(tempfile.gettempdir())) as folder:
            yield folder


def mixed_format(name: str, alike: bool | Sequence[str] = True) -> BudgetRules:
    """The rules of a format; `alike`: see `measure_sensitivity`. NotSupportedError where it holds one scheme."""
    if name not in RULES:
        raise NotSupportedError(
            f"Bits for a budget are not counted in the format {name}. Possible: {', '.join(RULES)}."
        )
    rules = RULES[name]()
    rules.programs = tuple(PROGRAMS if alike else ()) if isinstance(alike, bool) else tuple(alike)
    unknown = next((program for program in rules.programs if program not in PROGRAMS), None)
    if unknown is not None:
        raise ConfigError(f"alike: it is not known which layers {unknown!r} fuses. Possible: {', '.join(PROGRAMS)}.")
    return rules


def settings_of_folder(folder: Path, config: QConfig, rules: BudgetRules) -> str:
    """Return the settings of a table of sensitivities: the folder, layers left out or with schemes, the rules."""
    stored = config.to_dict()
    kept = [stored[name] for name in ("exclude", "layer_quant_config")]
    files = fingerprint_of_files([folder / "config.json", *shard_files(folder)])
    return hashlib.sha256(json.dumps([files, kept, rules.form.name, rules.programs]).encode()).hexdigest()


def _in_memory(
    model: nn.Module,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    _: Any,
    folder: Path | None,
    rules: BudgetRules,
    budget: AskedBudget | None,
) -> SensitivityTable:
    half = next((name for name, p in model.named_parameters() if p.dtype == torch.float16), None)
    if half is not None:
        raise ConfigError(
            f"{half} is float16, in which gradients vanish. Possible: load the model in float32 or bfloat16, or give "
            "its folder."
        )
    with onloaded(model) as offloaded:
        state = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            state.update(f"{name} {fingerprint_of_data([tensor])}".encode())
        with prepared(model, config):
            with offloaded.staying():
                elsewhere = weights_read_elsewhere(model, data)
            plan, weights = make_plan(config, model, read_elsewhere=elsewhere), partial(blocks_of, offloaded)
            return _measure(model, plan, data, specs, config, state.hexdigest(), folder, weights, rules, budget)


def _on_disk(
    source: str | Path,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    device: torch.device,
    folder: Path | None,
    rules: BudgetRules,
    budget: AskedBudget | None,
) -> SensitivityTable:
    job = CheckpointJob(config, OpenedFolder(Path(source)), QUARK, data=data)
    data = list(calibration_data(job.model, data) or ())

    def weights() -> BlockWeights:
        contents = job.contents()
        job.model.float()
        found = FromDisk(job.model, in_folder(contents.sources, contents.ties, job.checkpoint), device)
        fill_buffers(job.model)
        return found

    return _measure(
        job.model,
        job.plan,
        data,
        specs,
        config,
        settings_of_folder(Path(source), config, rules),
        folder,
        weights,
        rules,
        budget,
        Path(source),
    )


def _bounds(sizes: Sequence[Sequence[int | None]]) -> tuple[int, int]:
    """The least and the most that layers take together; None does not fit a layer."""
    possible = [[size for size in row if size is not None] for row in sizes]
    return sum(min(row, default=0) for row in possible), sum(max(row, default=0) for row in possible)


def _measure(
    model: nn.Module,
    plan: Plan,
    data: list[Any],
    specs: Mapping[str, LayerSpec],
    config: QConfig,
    fingerprint: str,
    folder: Path | None,
    weights: Callable[[], BlockWeights],
    rules: BudgetRules,
    budget: AskedBudget | None,
    source: Path | None = None,
) -> SensitivityTable:
    """The table; sizes are taken before `weights` may change the dtype of the model."""
    chosen = rules.layers(model, plan, config)
    if not chosen:
        raise ConfigError("Every layer is excluded or has a scheme already: there is nothing to choose.")
    layers = {name: [rules.fitting(name, layer, spec) for spec in specs.values()] for name, layer in chosen.items()}
    sizes = {
        name: [None if spec is None else rules.bytes(layer.weight, spec) for spec in layers[name]]
        for name, layer in chosen.items()
    }
    rest = rules.rest(model, plan, chosen, source)
    counted = {name: layer.weight.numel() for name, layer in chosen.items() if rules.is_counted(name)}
    if budget is not None:
        # Layers that need one scheme are found as the model runs: what they allow lies within these bounds.
        budget.check(*_bounds([sizes[name] for name in counted]), sum(counted.values()), rest)
    given = fingerprint_of_data(data)
    assert given is not None
    kept = {"model": fingerprint, "calibration data": given, "candidates": list(specs), "layers": list(chosen)}
    kept["programs"] = list(rules.programs)
    store = PassStore(folder, kept)
    swept = Sweep(model, layers, data, weights(), store, rules.programs).run()
    groups = tuple(_group(group, counted, list(specs), sizes, swept) for group in rules.groups(swept.groups))
    store.remove()
    return SensitivityTable(fingerprint, given, tuple(specs), groups, rest)


def _group(
    names: Sequence[str],
    counted: Mapping[str, int],
    candidates: Sequence[str],
    sizes: Mapping[str, Sequence[int | None]],
    swept: Swept,
) -> LayerGroup:
    """One row of the table: what fits all of its layers."""
    size, loss = {}, {}
    for index, candidate in enumerate(candidates):
        bytes_of = [sizes[name][index] for name in names if name in counted]
        losses = [swept.losses[name][index] for name in names]
        if None not in bytes_of:
            size[candidate] = sum(cast(list[int], bytes_of))
            loss[candidate] = sum(cast(list[float], losses))
    if not size:
        raise ShapeError(
            f"None of the candidates {', '.join(candidates)} fits {', '.join(names[:3])}. Possible: int8_wo."
        )
    return LayerGroup(tuple(names), sum(counted.get(name, 0) for name in names), size, loss)
