"""The figures of `make bench`: where each is in its case's result, and the most it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARTS = {
    "torch": ("import_time", "weight_only", "packing", "calibration", "file2file", "streaming", "algorithms"),
    "processes": ("processes",),
    "solvers": ("solvers",),
    "kernels": ("kernels",),
    "accuracy": ("accuracy",),
    "accuracy_fp4_inputs": ("accuracy_fp4_inputs",),
    "accuracy_int_inputs": ("accuracy_int_inputs",),
    "onnx": ("onnx_import", "onnx_calibration", "onnx_latency", "onnx_weight_only"),
    "onnx_quantize": ("onnx_quantize",),
    "onnx_search": ("onnx_search",),
    "onnx_algorithms": ("onnx_algorithms",),
    "real_models": ("real_models",),
}
"""Part -> its cases: scripts in cases/, or a module of this package.

Each is to take under eight minutes on two cores.
"""
ACCURACY_SCHEMES = {
    "accuracy": ("int3_g128", "int2_g64"),
    "accuracy_fp4_inputs": ("mxfp4", "nvfp4"),
    "accuracy_int_inputs": ("w8a8", "w4a4"),
}
"""Case -> the schemes that it measures: weights alone, and with inputs of 4-bit floats or of integers."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        case: Who measures it.
        name: What the table calls it.
        path: Its keys in the result.
        limit: The most it may be.
        unit: Behind the number. Seconds are of one machine; all else is compared with the last release.
        over: Keys of what it is divided by.
    """

    case: str
    name: str
    path: tuple[str, ...]
    limit: float
    unit: str = "x"
    over: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the file of the last release."""
        return ".".join((self.case, *self.path))

    @property
    def is_ratio(self) -> bool:
        """Whether it can be compared with that of another machine."""
        return self.unit != " s"

    def value(self, result: dict[str, Any] | None) -> float | None:
        """Its value in a result; None where the result lacks it."""
        found, base = _at(result, self.path), _at(result, self.over) if self.over else 1.0
        return None if found is None or base is None else found / base


def _at(result: dict[str, Any] | None, path: tuple[str, ...]) -> float | None:
    found: Any = result
    for key in path:
        found = None if found is None else found.get(key)
    return found


REAL_MODELS = ("YOLOv8n", "OCR detection", "OCR recognition", "OCR direction", "magika")
SEARCHED = (("magika", 8.0, 6.0), ("OCR direction", 3.0, 2.0), ("OCR detection", 6.0, 5.0))
"""Models that are searched; times of one plain quantization that the first command takes at most, and a later one."""
SCHEMES = ("int8_per_channel", "int4_group_128", "fp8_per_tensor", "mxfp4")
FIGURES = [
    Figure("import_time", "import quark.torch / import torch", ("ratio",), 1.15),
    *(
        Figure("weight_only", f"{s}: first model of a process / clone", ("cases", s, "first_cached_clone_ratio"), 6.0)
        for s in SCHEMES
    ),
    *(Figure("weight_only", f"{s}: later models / clone", ("cases", s, "clone_ratio"), 6.0) for s in SCHEMES),
    *(
        Figure("weight_only", f"{s}: peak extra memory", ("cases", s, "peak_extra_weights"), 1.0, " weights")
        for s in SCHEMES
    ),
    Figure("packing", "pack int4 4096 x 4096 per channel", ("layouts", "per_channel", "pack_seconds"), 0.05, " s"),
    Figure("packing", "pack int4 4096 x 4096 per group", ("layouts", "per_group", "pack_seconds"), 0.05, " s"),
    Figure("calibration", "static w8a8 / float forward", ("cpu_ratio",), 1.15),
    Figure("file2file", "MXFP4, file to file / copy and fake quantization", ("time_ratio",), 1 / 0.6),
    Figure("file2file", "two workers / one", ("two_workers_ratio",), 1 / 1.7),
    Figure("processes", "streamed GPTQ, two processes / one", ("gptq", "path"), 1 / 1.7),
    Figure("processes", "MXFP4, file to file, two processes / one", ("mxfp4", "path"), 1 / 1.7),
    Figure("file2file", "peak memory of a process", ("peak_tensors",), 2.0, " tensors"),
    Figure("streaming", "static w8a8, streamed / in memory", ("time_ratio",), 1.2),
    Figure("streaming", "peak memory with twice the blocks", ("memory_growth",), 1.1),
    *(
        Figure("algorithms", f"{name} / float forward", (case, "cpu_ratio"), limit)
        for case, name, limit in (
            ("gptq", "GPTQ uint4 g128", 6.0),
            ("awq", "AWQ uint4 g128", 8.0),
            ("smooth", "SmoothQuant, static w8a8", 2.2),
        )
    ),
    *(
        Figure("algorithms", f"{case}: peak memory above the model", (case, "peak_extra_mb"), 90.0, " MB")
        for case in ("gptq", "awq", "smooth")
    ),
    *(
        Figure(
            "solvers",
            f"1B shape, bfloat16: {name} / float forward",
            (case, "cpu_seconds"),
            limit,
            over=(case, "forward_cpu"),
        )
        for case, name, limit in (
            ("gptq", "GPTQ uint4 g128", 12.0),
            ("awq", "AWQ uint4 g128", 23.0),
            ("qronos", "Qronos uint4 g128", 24.0),
            ("importance", "importance uint4 g128", 4.0),
        )
    ),
    # What the solvers left before their blocks were compiled: none may get faster by getting worse.
    Figure("solvers", "1B shape, bfloat16: GPTQ, error of the layers", ("gptq", "layer_error"), 0.00905, ""),
    # Two float32 matrices of 5632 channels, the inputs of a block and 100 MB.
    Figure("solvers", "1B shape, bfloat16: GPTQ, peak memory above the model", ("gptq", "peak_extra_mb"), 450.0, " MB"),
    *(
        Figure(
            next(case for case, schemes in ACCURACY_SCHEMES.items() if scheme.removesuffix("_outliers") in schemes),
            f"{scheme}, {name}: share of the divergence that stays",
            (scheme, name, "left"),
            limit,
        )
        # What is aimed at by Fisher information; of the others, that none is worse than rounding to nearest.
        for scheme, name, limit in (
            ("int3_g128", "fisher_groups", 0.18),
            ("int2_g64", "fisher_groups", 0.15),
            ("mxfp4", "fisher", 0.7),
            ("nvfp4", "fisher", 0.65),
            ("int3_g128", "gptq", 1.0),
            ("int3_g128", "qronos_groups", 1.0),
            ("int3_g128", "awq", 1.0),
            ("int3_g128", "importance", 1.0),
            ("int2_g64", "gptq", 1.0),
            ("int2_g64", "qronos_groups", 1.0),
            ("mxfp4", "rotation+qronos", 1.0),
            ("w8a8_outliers", "smooth", 0.1),
            ("w8a8_outliers", "rotation", 0.1),
            ("mxfp4_outliers", "rotation+qronos", 0.5),
            ("w4a4", "rotation+qronos", 0.5),
        )
    ),
    *(
        Figure("kernels", f"{name}, {rows} rows / {dtype} layer", path, limit)
        for dtype, name, rows, limit in (
            ("bfloat16", "uint4_g128", 1, 0.45),
            ("bfloat16", "uint4_g128", 64, 5.0),
            ("bfloat16", "int8", 1, 0.6),
            ("bfloat16", "int8", 64, 2.5),
            ("bfloat16", "int8_int8", 1, 0.75),
            ("bfloat16", "int8_int8", 64, 0.75),
            ("float32", "int8_int8", 1, 0.5),
            ("float32", "int8_int8", 64, 0.25),
        )
        for path in [("layers", dtype, name, f"rows_{rows}")]
    ),
    *(
        Figure("kernels", f"generate, {name} / bfloat16", ("generate", name, "time"), limit)
        for name, limit in (("uint4_g128", 0.6), ("int8", 0.85), ("int8_int8", 0.75))
    ),
    *(
        Figure("kernels", f"generate, small model, {name} / bfloat16", ("generate_small", name, "time"), limit)
        for name, limit in (("uint4_g128", 1.0), ("int8", 0.85), ("int8_int8", 1.0))
    ),
    Figure("onnx_import", "import quark.onnx after onnx and onnxruntime", ("quark_after_seconds",), 0.25, " s"),
    Figure("onnx_import", "import quark.onnx / import onnx, onnxruntime", ("ratio",), 2.25),
    *(
        Figure("onnx_calibration", f"{model}, {method} / float inference", (model, "ratios", method), limit)
        for model in ("resnet50", "encoder")
        for method, limit in (("MinMax", 1.2), ("Percentile", 1.6), ("Entropy", 1.6))
    ),
    *(
        Figure("onnx_quantize", f"{model}, {method}: {what} / onnxruntime", (model, method, f"{what}_ratio"), limit)
        for model in ("resnet50", "encoder", "bert_base")
        for method, seconds in (
            ("MinMax", 0.5),
            ("MinMax_per_tensor", 0.7 if model == "resnet50" else 0.6),
            ("Percentile", 0.25),
            ("Entropy", 0.25),
        )
        for what, limit in (("seconds", seconds), ("peak_mb", 0.5))
    ),
    *(
        Figure("onnx_quantize", f"{model}, {method}: whole call", (model, method, "quark", "seconds"), limit, " s")
        for model in ("resnet50", "encoder")
        for method, limit in (("MinMax", 2.2), ("Percentile", 2.3), ("Entropy", 2.3))
    ),
    *(
        Figure("onnx_search", f"{model}, {what}", (model, key), limit)
        for model, first, later in SEARCHED
        for key, what, limit in (
            ("first_ratio", "no configuration: CPU seconds / quantize_static", first),
            ("later_ratio", "no configuration, known kernels: CPU seconds / quantize_static", later),
            ("size", "no configuration: size / float", 0.51),
            ("noise", "no configuration: noise / signal", 0.1),
            ("task_lost", "no configuration: share of the task lost", 0.03),
        )
    ),
    Figure("onnx_latency", "resnet50, ort_x64: time / float", ("resnet50", "ort_x64", "time"), 1 / 3),
    Figure("onnx_latency", "encoder, ort_x64: time / float", ("encoder", "ort_x64", "time"), 1 / 1.8),
    Figure("onnx_latency", "resnet50, BF16: time / float", ("resnet50", "bf16", "time"), 2.0),
    Figure("onnx_latency", "encoder, BF16: time / float", ("encoder", "bf16", "time"), 2.0),
    *(
        Figure("onnx_algorithms", f"{model} {scheme}, {name}: error left", (model, scheme, name, "left"), limit)
        for model, scheme, name, limit in (
            ("digits", "a8w8", "cle", 1.02),
            ("digits", "a8w8", "bias_correction", 1.02),
            ("digits", "a8w8", "adaquant_1e-6", 0.71),
            ("digits", "a8w4", "adaround", 0.5),
            ("digits", "bf16", "adaquant_1e-6", 1.0),
            ("digits_hard", "a8w8", "cle", 0.003),
            ("resnet18", "bf16", "adaquant_100_1e-6", 0.99),
            ("minilm", "w4_group_32", "gptq_4_group_32", 0.63),
            ("minilm_outliers", "u8w8_channel", "smooth_quant", 0.316),
        )
    ),
    *(
        Figure("onnx_algorithms", f"{model}, {name}: CPU seconds", (model, "a8w8", name, "cpu_seconds"), limit, " s")
        for model, name, limit in (
            ("resnet18", "adaround_100", 20.0),
            ("resnet18", "adaquant_100", 15.0),
            ("resnet50", "cle", 8.0),
            ("resnet50", "bias_correction", 16.0),
        )
    ),
    Figure("onnx_weight_only", "int8 of a 2.7 GB model", ("seconds",), 12.0, " s"),
    Figure("onnx_weight_only", "its anonymous memory", ("anonymous_gb",), 0.5, " GB"),
    *(
        Figure("real_models", f"{model}, {name}: {what}", (model, method, key), limit)
        for model in REAL_MODELS
        for method, name in (("quark", "no configuration"), ("quark, no data", "no configuration, no data"))
        for key, what, limit in (("time", "time / float", 1.0), ("size", "size / float", 0.5))
    ),
    *(
        Figure("real_models", f"{model}, no configuration: noise / best peer's", (model, "noise_to_best_peer"), 1.0)
        for model in REAL_MODELS
    ),
]
