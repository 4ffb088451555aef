"""One call: `quark.quantize(model, "int4", data=...)`, for a module, a model folder or an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quark.errors import ConfigError

IN_MEMORY = "transformers"
"""The goal of a module that stays in memory: every scheme computes there."""


def quantize(
    model: Any,
    scheme: str | None = None,
    *,
    data: Any = None,
    goal: str | None = None,
    output: str | os.PathLike[str] | None = None,
    bits: float | None = None,
    effort: str | None = None,
    algorithm: str | Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    samples: int | None = None,
    overwrite: bool = False,
) -> Any:
    """Quantize a model with what its goal asks for.

    Args:
        model: A `torch.nn.Module`, which is changed in place; the path of a folder of transformers; or the path of an
            ONNX file.
        scheme: A name of `quark schemes`, or a family: "int4", "W8A8", "Q4_K_M". None: the default of the goal.
        data: Calibration data. Of a module: batches, each a tensor such as token ids (samples, tokens), a dict of
            arguments, or a tuple. Of a path: what --calib takes, a text file, a folder, or an .npz file; of an ONNX
            file also a data reader, an iterable of feeds, an array of all samples, (samples, ...), or a dict of such.
        goal: A program: "vllm", "sglang", "transformers", "llama.cpp", "onnxruntime", "openvino", "ryzen-ai", "npu".
            None: "transformers" of a module or a folder, "onnxruntime" of an ONNX file.
        output: Folder or file to make. A path needs one; of a module None leaves it in memory.
        bits: Of a weight, in place of a scheme: 2, 3, 4, 5, 6, 8 or 16, as the goal has them; of a folder also 4.25.
        effort: "fast", "balanced" (default with data) or "best".
        algorithm: In place of what the effort chooses, with parameters: "gptq:refine_passes=3".
        exclude: Patterns of layers or nodes that stay in float.
        samples: Most calibration samples.
        overwrite: Replace the output.

    Returns:
        The quantized module, or the path of what was made.

    Raises:
        QuarkError: See `quark.goals.choose`; what the flow raises.

    Example:
        >>> model = quark.quantize(model, "int4")
        >>> quark.quantize("./llama", goal="llama.cpp", output="llama.gguf")
    """
    from quark.goals import choose

    words = [algorithm] if isinstance(algorithm, str) else algorithm
    named = scheme if scheme or goal or bits else _scheme_of(model, data is not None)
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    onnx = path is not None and path.suffix.lower() == ".onnx"
    chosen = choose(
        goal or ("onnxruntime" if onnx else IN_MEMORY), onnx, scheme=named, bits=bits, effort=effort,
        algorithms=words, has_data=data is not None,
    )  # fmt: skip
    if path is None:
        return _module(model, chosen, data, output, list(exclude), overwrite)
    if output is None:
        raise ConfigError(f"quantize({str(path)!r}) needs output=, the folder or file to make.")
    from quark.commands.goals import quantize_path

    return quantize_path(path, chosen, data, os.fspath(output), list(exclude), samples, overwrite, words, bits)


def _scheme_of(model: Any, has_data: bool) -> str | None:
    """8 bits for a module that transformers does not know: groups of 128 do not divide a convolution's channels."""
    named = getattr(getattr(model, "config", None), "model_type", None) is not None
    if named or isinstance(model, (str, os.PathLike)):
        return None
    return "int8" if has_data else "int8_wo"


def _module(model: Any, chosen: Any, data: Any, output: Any, exclude: list[str], overwrite: bool) -> Any:
    from quark.commands.options.words import torch_algorithms
    from quark.goals.facts import MIX_NAMES
    from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_safetensors, gguf_config
    from quark.torch.plan import divides

    if chosen.mixed is not None:
        raise ConfigError(
            "A budget for a module: a mix is chosen for a folder. Possible: its path, or "
            "quark.torch.bit_budget.measure.measure_sensitivity."
        )
    folder = getattr(model, "name_or_path", "")
    if output is not None and chosen.form == "onnx":
        raise ConfigError("An ONNX file of a module needs inputs: quark.torch.export_onnx(model, folder, inputs).")
    if output is not None and chosen.form == "gguf" and not folder:
        raise ConfigError("A GGUF file needs a tokenizer: quark.torch.export_gguf(model, folder, name, tokenizer).")
    algorithms = torch_algorithms(chosen.algorithms) or None
    if chosen.scheme in MIX_NAMES:
        config = gguf_config(model, chosen.scheme, algorithms, exclude)
    else:
        template = LLMTemplate.get(getattr(getattr(model, "config", None), "model_type", None) or "auto")
        kept = [*template.exclude_layers_name, *exclude]
        chosen = chosen.fitted(lambda name: divides(template.get_config(name, exclude_layers=kept), model))
        config = template.get_config(chosen.scheme, algorithms, exclude_layers=kept)
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_model(model, data))
    if output is None:
        return made
    path = Path(output)
    if chosen.form == "gguf":
        export_gguf(made, path.parent, path.stem, folder, overwrite=overwrite)
    else:
        export_safetensors(made, path, chosen.form, overwrite=overwrite)
    return made
