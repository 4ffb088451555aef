"""export_onnx: a quantized model as an ONNX file that stock ONNX Runtime runs.

1. `torch.onnx.export` traces the model, each quantized tensor marked by one node (marked_tensors.py);
2. the markers become stored codes (weights.py) or Q/DQ of live tensors (activations.py);
3. constants of the same bits are written once, and shapes only where none are inferred;
4. the model is checked and written, whole or not at all.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quark.__version__ import __version__
from quark.base.files import check_file
from quark.base.log import logger
from quark.core.granularity import PerChannel, PerTensor
from quark.errors import ConfigError, NotSupportedError, one_line, require_packages
from quark.torch.layers.replace import refuse_packed
from quark.torch.model.blocks.offloading import refuse_offloaded

if TYPE_CHECKING:
    import onnx_ir as ir

FILE = "quark_model.onnx"
PLAIN_OPSET, DEFAULT_OPSET = 20, 21
_PLAIN_TYPES = frozenset({"int8", "uint8", "int32", "uint32", "bfloat16", "float16"})
"""Types that opset 20 holds, per tensor and per channel; all others need 21."""


def export_onnx(
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    input_args: Any,
    opset_version: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    verbose: bool = False,
    do_constant_folding: bool = True,
    operator_export_type: Any = None,
    uint4_int4_flag: bool = False,
    dynamo: bool = False,
    *,
    dynamic_shapes: Any = None,
    overwrite: bool = True,
) -> Path:
    """Write a quantized model as an ONNX file, weights as integers: as `output_dir/quark_model.onnx`, or as named.

    Args:
        model: From `ModelQuantizer.quantize_model`, frozen or not, or loaded from a checkpoint; not changed.
        output_dir: Folder, made if it is not there; other files in it stay. A name that ends in .onnx and is no folder
            is that of the file.
        input_args: Example input: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        opset_version: Of the file; default 20, or 21 where a type needs it.
        input_names, output_names: Of the graph; default: those of the arguments and of the model's output.
        verbose: Show what torch.onnx says.
        do_constant_folding: Let torch.onnx simplify the graph.
        operator_export_type: None or `torch.onnx.OperatorExportTypes.ONNX`.
        uint4_int4_flag: Store codes of 2 to 4 bits as INT4 and UINT4; False stores them as INT8 and UINT8.
        dynamo: Either value gives the same file, whose graph comes from torch.export; for False a log line says so.
        dynamic_shapes: As for `torch.onnx.export`: axes that may have any length, `{"input_ids": {0: "batch"}}`.
        overwrite: Replace a file that is there; False: raise.

    Returns:
        The file. Over 2 GB, the weights lie beside it, in `quark_model.onnx.data`.

    Raises:
        ConfigError: A model that is not quantized or was accelerated, or an option that is wrong.
        NotSupportedError: An option or a spec without an ONNX form, or a model that torch.export cannot trace.
        OutputExistsError, OutputError: See there. Nothing is left of a file.
    """
    if operator_export_type not in (None, "ONNX", torch.onnx.OperatorExportTypes.ONNX):
        raise NotSupportedError(f"operator_export_type={operator_export_type!r}: only ONNX is supported.")
    refuse_packed(model)
    refuse_offloaded(model, "export_onnx")
    args, kwargs = _arguments(input_args, next((p.device for p in model.parameters()), torch.device("cpu")))
    place = Path(output_dir)
    file = place if place.suffix == ".onnx" and not place.is_dir() else place / FILE
    check_file(file, overwrite)
    options: dict[str, Any] = {"input_names": list(input_names) or None, "output_names": list(output_names) or None}
    options |= {"verbose": verbose, "optimize": do_constant_folding, "dynamic_shapes": dynamic_shapes}
    written = _quantized_graph(model, args, kwargs, opset_version, uint4_int4_flag, options)
    # These import onnx: when a model is really exported.
    from quark.onnx_ops.compact import drop_inferable, share_constants
    from quark.onnx_ops.saving import save

    share_constants(written)
    drop_inferable(written)
    replaced = " (replaced)" if file.exists() else ""
    save(written, file, overwrite=overwrite)
    if not dynamo:
        logger.info("The graph comes from torch.export, also with dynamo=False.")
    logger.info("Exported to %s%s.", file, replaced)
    return file


def _arguments(inputs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward, on the device of the model."""

    def move(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) else x

    if isinstance(inputs, Mapping) or hasattr(inputs, "keys"):
        return (), {key: move(inputs[key]) for key in inputs.keys()}  # noqa: SIM118 (BatchEncoding)
    if isinstance(inputs, (tuple, list)):
        return tuple(map(move, inputs)), {}
    if isinstance(inputs, torch.Tensor):
        return (move(inputs),), {}
    raise ConfigError(
        f"input_args is a {type(inputs).__name__}; possible: a tensor, a tuple, or a mapping of arguments."
    )


def _quantized_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    opset: int | None,
    four_bit: bool,
    options: dict[str, Any],
) -> ir.Model:
    require_onnx_packages()
    # These import onnx and onnx_ir: when a model is really exported.
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

    from quark.onnx_ops.graph_writer import GraphWriter
    from quark.torch.writers.onnx.activations import Known, write_activation
    from quark.torch.writers.onnx.marked_tensors import MARKER_DOMAIN, marked
    from quark.torch.writers.onnx.weights import write_weight

    with marked(model) as tensors, _as_in_use(model):
        if not tensors:
            raise ConfigError(
                "Only a model from ModelQuantizer.quantize_model can be exported; this one is not quantized."
            )
        specs = [tensor.spec for tensor in tensors.values()]
        plain = all(s.dtype.name in _PLAIN_TYPES and isinstance(s.split, (PerTensor, PerChannel)) for s in specs)
        exported = _traced(model, args, kwargs, opset or (PLAIN_OPSET if plain else DEFAULT_OPSET), options)
    writer, known = GraphWriter(exported, typed=True), Known()
    for node in [node for node in exported.graph if node.domain == MARKER_DOMAIN]:
        tensor = tensors[node.attributes["tensor"].as_string()]
        stored = getattr(node.inputs[0], "const_value", None)
        if stored is None:  # a value that is computed
            write_activation(writer, node, tensor, known)
        else:
            raw = getattr(stored, "raw", None)
            weight = raw.detach() if isinstance(raw, torch.Tensor) else torch.from_numpy(stored.numpy().copy())
            write_weight(writer, node, tensor, tensor.beside(weight), four_bit)
    for step in (RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass(), ClearMetadataAndDocStringPass()):
        step(exported)
    # The pass leaves what torch.export notes of constants, whose names and notes take more bytes than small ones do.
    for value in exported.graph.initializers.values():
        value.metadata_props.clear()
    exported.producer_name, exported.producer_version = "quark", __version__
    return exported


def require_onnx_packages() -> None:
    """Raise MissingDependencyError for a package that the export, or torch's own export below it, needs."""
    require_packages("export_onnx", "torch,onnx", "onnx", "onnx_ir", "onnxscript")


@contextmanager
def _as_in_use(model: nn.Module) -> Iterator[None]:
    """Within: evaluation mode, and no cache of keys and values, which would be an output."""
    modes = [(module, module.training) for module in model.modules()]
    config: Any = getattr(model, "config", None)
    cache = getattr(config, "use_cache", None)
    # Not model.eval(): an exported GraphModule refuses it.
    for module, _ in modes:
        module.training = False
    if cache:
        config.use_cache = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        if cache:
            config.use_cache = cache


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opset: int, options: dict[str, Any]
) -> ir.Model:
    """The graph with its markers."""
    with _quiet(options["verbose"]), torch.no_grad():
        try:
            program = torch.onnx.export(model, args, kwargs=kwargs, opset_version=opset, dynamo=True, **options)
        except torch.onnx.errors.OnnxExporterError as error:
            cause = one_line(error.__cause__ or error)[:300]
            raise NotSupportedError(f"torch.onnx cannot export {type(model).__name__}: {cause}") from error
    assert program is not None
    if program.model.opset_imports.get("") != opset:
        raise ConfigError(
            f"opset_version={opset}: torch.onnx writes {program.model.opset_imports.get('')} in its place."
        )
    return program.model


@contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Keep logs of torch.onnx about packages that are absent, and its own deprecations, from the user."""
    library = logging.getLogger("torch.onnx")
    level = library.level
    with warnings.catch_warnings():
        if not verbose:
            library.setLevel(logging.ERROR)
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            library.setLevel(level)
