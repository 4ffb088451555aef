"""`quark inspect`: what is in a model, and what a runtime makes of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from quark.base.command_line import Results, new_table, results
from quark.base.files import refuse_pickle, why_no_model
from quark.base.json_objects import plain_json
from quark.commands.options.kinds import check_options, onnx_option
from quark.errors import ConfigError, FormatError
from quark.jobs.request import is_onnx

if TYPE_CHECKING:
    import onnx

    from quark.commands.folders.stored_layers import StoredFolder
    from quark.commands.onnx_files.file_times import FileTimes
    from quark.onnx.evaluation.ort_fusion import Fusion

QDQ = ("QuantizeLinear", "DequantizeLinear")


def inspect(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="An ONNX or GGUF file, or a folder of a Hugging Face model.")],
    measure: Annotated[
        bool,
        onnx_option(
            "--measure", help="Measure the quantized nodes on this machine, and the same nodes in float; on one thread."
        ),
    ] = False,
    data: Annotated[
        Path | None,
        onnx_option(help="With --measure: samples; the first one is used. Default: noise, if all sizes are known."),
    ] = None,
) -> None:
    """Show what is quantized in a model, and which nodes of an ONNX file ONNX Runtime computes in integers, or why not.

    Example: quark inspect model-a8w8.onnx
    """
    check_options(context, model)
    if data is not None and not measure:
        raise ConfigError("--data is what --measure runs.")
    if model.suffix == ".gguf":
        _inspect_gguf(model)
    elif is_onnx(model):
        _inspect_onnx(model, measure, data)
    else:
        _inspect_folder(model)


def _inspect_onnx(model: Path, measure: bool, data: Path | None) -> None:
    """The operators and the types of an ONNX file, what runs in integers, and with `measure` the times."""
    # onnx is imported after the arguments are parsed, so that --help is instant.
    from quark.onnx.calibration.data.inputs import file_bytes
    from quark.onnx.evaluation.graph_parts import GraphParts
    from quark.onnx.evaluation.ort_fusion import inspect_fusion, kernel_graph
    from quark.onnx.evaluation.ort_fusion_nodes import quantized_graphs
    from quark.onnx.graph.proto_file import read_header
    from quark.report.shown import text_table

    console, proto = results(), read_header(model)
    opsets = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in proto.opset_import)
    maker = f", by {proto.producer_name}" if proto.producer_name else ""
    console.print(f"{model}: {file_bytes(model) / 1e6:.2f} MB, {opsets}, IR {proto.ir_version}{maker}", highlight=False)
    counts = Counter(
        (node.op_type, node.domain or "ai.onnx") for graph, _ in quantized_graphs(proto.graph) for node in graph.nodes
    )
    table = new_table("operator", "domain", "nodes", title="Operators")
    for (op_type, domain), count in counts.most_common():
        table.add_row(op_type, domain, str(count))
    console.print(table)
    console.print(_types(proto.graph))
    fates = inspect_fusion(model)
    _print_fusion(fates, console)
    times = _times(model, data) if measure else None
    if fates:
        nodes = kernel_graph(model, fates)
        parts = GraphParts.of(nodes) if times is None else GraphParts.of(nodes, times.by_node, times.file_seconds)
        for each in parts.tables():
            console.print(text_table(each))
    if times is not None:
        _print_times(times, console)


def _times(model: Path, data: Path | None) -> FileTimes:
    from quark.commands.onnx_files.file_times import file_times
    from quark.onnx.calibration.data.path_reader import PathDataReader

    return file_times(model, None if data is None else PathDataReader(model, data, batch_size=1))


def _print_times(found: FileTimes, console: Results) -> None:
    """The times of the quantized nodes, and what the file gains in all."""
    table = new_table("nodes", "ops", "float µs", "this file µs", "gain µs", title="Quantized nodes, least gain first")
    for row in found.nodes:
        spent = (row.float_seconds, row.file_seconds, row.float_seconds - row.file_seconds)
        table.add_row(row.nodes[-1], ", ".join(row.op_types), *(f"{seconds * 1e6:.1f}" for seconds in spent))
    console.print(table)
    console.print(
        f"Kernels take {found.file_seconds * 1e3:.3f} ms, of which conversions {found.conversions * 1e3:.3f} ms; "
        f"those of the float model {found.float_seconds * 1e3:.3f} ms.",
        highlight=False,
    )


def _bytes(tensor: onnx.TensorProto) -> int:
    outside = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return sum(outside) or len(tensor.raw_data) or tensor.ByteSize()


def _types(graph: onnx.GraphProto) -> Table:
    """Of each element type: the constants, and the Q/DQ nodes, of the graph and its bodies."""
    from onnx import TensorProto

    from quark.onnx.evaluation.ort_fusion_nodes import quantized_graphs

    rows = defaultdict[int, Counter[str]](Counter)
    for quantized, own in quantized_graphs(graph):
        for tensor in own.values():
            rows[tensor.data_type].update(constants=1, bytes=_bytes(tensor))
        for node in quantized.nodes:
            if node.op_type in QDQ:
                rows[quantized.kind(node)][node.op_type] += 1
    table = new_table("element type", "constants", "MB", *QDQ, title="Element types")
    for kind, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"]):
        counts = (str(row[op_type] or "") for op_type in QDQ)
        name = TensorProto.DataType.Name(kind).lower()
        table.add_row(name, str(row["constants"] or ""), f"{row['bytes'] / 1e6:.3f}", *counts)
    return table


def _print_fusion(rows: list[Fusion], console: Results) -> None:
    if not rows:
        console.print("No node reads a DequantizeLinear or is an integer operator.")
        return
    kernels = Counter(row.kernel or "removed" for row in rows if row.integer)
    shown = ", ".join(f"{kernel} {count}" for kernel, count in kernels.most_common())
    console.print(
        f"ONNX Runtime (CPU) runs {sum(kernels.values())} of {len(rows)} quantized nodes in integers"
        + (f": {shown}" if shown else ""),
        highlight=False,
    )
    left = [row for row in rows if not row.integer]
    if left:
        table = new_table("node", "op", "runs as", "why", "what to do", title="Quantized, but computed in float")
        for row in left:
            table.add_row(row.node, row.op_type, row.kernel, row.reason, row.advice)
        console.print(table)


def _inspect_folder(folder: Path) -> None:
    """The quantization_config of a Hugging Face folder, and how its layers are stored."""
    config = _read_config(folder / "config.json")
    quantization = config.get("quantization_config")
    if not isinstance(quantization, (dict, type(None))):
        raise FormatError(f"{folder / 'config.json'}: quantization_config is {quantization!r:.80}, not an object.")
    size = sum(weights.stat().st_size for weights in folder.glob("*.safetensors") if weights.is_file())
    console = results()
    console.print(f"{folder}: {config.get('model_type', 'model')}, {size / 1e6:.2f} MB", highlight=False)
    stored = None
    if size:
        from quark.commands.folders.stored_layers import stored_folder  # imports torch: where there are weights

        stored = stored_folder(folder)
        quantization = stored.quantization
    if not quantization:
        console.print("Its config.json has no quantization_config: a float model.")
        return
    table = new_table("key", "value", title="quantization_config")
    for key, value in _flat(quantization):
        table.add_row(key, value)
    console.print(table)
    if stored is not None:
        _print_layers(stored, console)


def _print_layers(stored: StoredFolder, console: Results) -> None:
    table = new_table("layers", "", "stored as", "bits", "MB", title="Matrices, bits for a weight with its scales")
    for row in stored.layers:
        bits = "" if row.bits is None else f"{row.bits:.2f}"
        table.add_row(row.name, str(row.count), row.stored, bits, f"{row.size / 1e6:.3f}")
    console.print(table)
    if stored.why_not_read:
        console.print(stored.why_not_read, highlight=False, soft_wrap=True)


def _read_config(file: Path) -> dict[str, Any]:
    """Without torch, which reading a model folder to load it needs."""
    try:
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError
        config = plain_json(file.read_text(encoding="utf-8"))
    except OSError:
        refuse_pickle(file.parent)
        why = why_no_model(file.parent)
        raise FormatError(f"{file.parent} is neither an .onnx file nor a model folder: {why}.") from None
    except ValueError as error:
        raise FormatError(f"{file} is not the config of a model: {error}.") from None
    if not isinstance(config, dict):
        raise FormatError(f"{file} is not the config of a model: it is {config!r:.80}, not an object.")
    return config


def _inspect_gguf(file: Path) -> None:
    """Metadata of a GGUF file, and how many tensors and bytes there are of each type."""
    from quark.gguf import open_gguf

    reader, console, rows = open_gguf(file), results(), defaultdict[str, Counter[str]](Counter)
    for tensor in reader.tensors:
        rows[tensor.tensor_type.name].update(tensors=1, values=int(tensor.n_elements), bytes=int(tensor.n_bytes))
    console.print(f"{file}: {file.stat().st_size / 1e6:.2f} MB", highlight=False)
    metadata = new_table("key", "value", title="Metadata")
    for name, field in reader.fields.items():
        value = field.contents()
        metadata.add_row(name, f"{len(value)} entries" if isinstance(value, list) else str(value))
    console.print(metadata)
    table = new_table("type", "tensors", "values", "MB", title="Tensors")
    for kind, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"]):
        table.add_row(kind, str(row["tensors"]), str(row["values"]), f"{row['bytes'] / 1e6:.3f}")
    console.print(table)


def _flat(entries: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the entries that are set, and their values as texts: nested keys are joined by dots."""
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value not in (None, [], ""):
            yield f"{prefix}{key}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)
