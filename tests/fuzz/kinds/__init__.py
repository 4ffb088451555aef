"""The kinds of damaged inputs, a file each. A new one is a file here and a line below."""

from __future__ import annotations

from tests.fuzz.case import Make
from tests.fuzz.kinds import (
    calibration_data,
    chat_templates,
    command_lines,
    configurations,
    encoded_sources,
    gguf_files,
    graph_archives,
    imatrices,
    model_folders,
    onnx_models,
    patterns,
    quantized_folders,
    recipes,
    safetensors_files,
    statistics_files,
)

KINDS: dict[str, Make] = {
    "folder": model_folders.make,
    "safetensors": safetensors_files.make,
    "quantized": quantized_folders.make,
    "encoded": encoded_sources.make,
    "onnx": onnx_models.make,
    "calibration": calibration_data.make,
    "statistics": statistics_files.make,
    "configuration": configurations.make,
    "command": command_lines.make,
    "gguf": gguf_files.make,
    "imatrix": imatrices.make,
    "recipe": recipes.make,
    "pattern": patterns.make,
    "template": chat_templates.make,
    "graph": graph_archives.make,
}
