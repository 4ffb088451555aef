"""One call: `quark.quantize(model, "int4", data=...)`, for a module, a model folder or an ONNX file; and what the
other commands do, as calls of the same words: `quark.evaluate`, `quark.compare`, `quark.convert`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from quark.errors import ConfigError, QuarkError
from quark.goals.efforts import FAST

if TYPE_CHECKING:
    from quark.jobs.compare import ComparedSchemes
    from quark.jobs.evaluate import MeasuredFiles, MeasuredPipeline
    from quark.jobs.folders.compared.measure import MeasuredFolders
    from quark.jobs.request import Kinds

OF_THE_COMMAND = ("report", "write_recipe", "log_file", "process_timeout")
"""Options of what the command does beside its output: it writes something, or joins the processes of torchrun."""
OF_QUANTIZE = {"for": "goal", "calib": "data", "force": "overwrite", "format": "export_format"}
OF_CONVERT = {"export-format": "format", "force": "overwrite"}
"""Options that have other names as keywords."""
IN_MEMORY = "transformers"
"""The goal of a module that stays in memory: every scheme computes there."""

Module = TypeVar("Module")


@overload
def quantize(model: str | os.PathLike[str], scheme: str | None = None, **options: Any) -> Path: ...


@overload
def quantize(model: Module, scheme: str | None = None, **options: Any) -> Module: ...


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
    exclude: str | Sequence[str] = (),
    samples: int | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Any:
    """Quantize a model for the program that will run it.

    Args:
        model: A `torch.nn.Module`, which is changed in place; the path of a folder of transformers, or of a GGUF file,
            which is read as such a folder; or the path of an ONNX file.
        scheme: A name of `quark schemes`, or a family: "int4", "W8A8", "Q4_K_M". None: the default of the goal.
        data: Calibration data. For a module: a list of batches, each a tensor such as token ids (samples, tokens), a
            dict of arguments, or a tuple; or the path of stored batches (`quark.torch.stored_batches`). For a folder:
            the path of a text file, a folder or an .npz file, as for --calib. For an ONNX file: such a path, a data
            reader, an iterable of feeds, an array of all samples (samples, ...), or a dict of arrays.
        goal: The program that will run the result, one of `quark.goals.GOALS`: "vllm", "llama.cpp" ... None means
            "transformers" for a module or a folder, "diffusers" for a network of diffusers, and "onnxruntime" for an
            ONNX file.
        output: Folder or file to write. Required if `model` is a path. A module stays in memory if it is None.
        bits: Bits per weight, instead of a scheme: 2, 3, 4, 5, 6, 8 or 16, if the goal has a scheme with so many. For a
            folder also a mean, such as 4.25.
        effort: Time to spend on accuracy: "fast", "balanced" or "best". None means "balanced" with data, and for a
            folder of a language model with `goal` if it takes less than ten minutes; else "fast".
        algorithm: Algorithm to use instead of those that the effort chooses: "gptq", "gptq:refine_passes=3".
        exclude: Patterns of layers or nodes that stay in float.
        samples: Number of calibration samples to use; for batches in memory the first ones.
        overwrite: Replace an existing output.
        options: If `model` is a path, other options of `quark quantize`, with the names of the fields in
            `quark.jobs.request`: `device="cuda"`, `kv_cache="fp8"`, `layer=("*.down_proj=int8_wo",)`.

    Returns:
        The quantized module, or the path of the output.

    Raises:
        DamageError: The model of a folder is outside of `max_kl`, `max_perplexity` or `min_agreement`.
        QuarkError: An argument is wrong, the goal cannot load the scheme, or the model or the data cannot be used.

    Example:
        >>> model = quark.quantize(model, "int4")
        >>> quark.quantize("./llama", goal="llama.cpp", output="llama.gguf")
    """
    words = (algorithm,) if isinstance(algorithm, str) else None if algorithm is None else tuple(algorithm)
    kept = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    with _spelled(OF_QUANTIZE):
        if not isinstance(model, (str, os.PathLike)):
            if isinstance(data, (str, os.PathLike)):
                from quark.torch import stored_batches

                data = stored_batches(data, model, samples)  # read one at a time
            elif data is not None and samples is not None:
                data = list(itertools.islice(data, samples))
            return _module(model, scheme, data, goal, output, bits, effort, words, [*kept], overwrite, options)
        is_path = isinstance(data, (str, os.PathLike))
        said = {
            "goal": goal, "scheme": scheme, "bits": bits, "effort": effort, "algorithm": words, "samples": samples,
            "exclude": kept or None, "calib": Path(data) if is_path else None,
            "output": None if output is None else os.fspath(output), "force": overwrite or None,
        }  # fmt: skip
        return _path(Path(model), said, options, None if is_path else data)


def _path(model: Path, said: dict[str, Any], options: Mapping[str, Any], data: Any) -> Path:
    """Quantize a folder or an ONNX file; return what a program opens."""
    from quark.goals.upload import say_upload
    from quark.jobs import FileJob, request_of, resolve
    from quark.jobs.request import is_onnx

    if said["output"] is None:
        raise ConfigError(f"quantize({str(model)!r}) needs output=, the folder or file to make.")
    of_command = sorted({*options} & {*said})
    if of_command:
        named = ", ".join(f"{OF_QUANTIZE[name]}= for {name}" for name in of_command)
        raise ConfigError(f"{', '.join(of_command)}: so the command calls it. Possible: {named}.")
    _refuse_of_command("quantize", options)
    said = _with_goal(model, said, options)
    if data is not None and not is_onnx(model):
        raise ConfigError(
            f"data of a folder are a path, got {type(data).__name__}. Possible: the path of a text, a folder or an "
            ".npz file, or the model itself with batches."
        )
    job = resolve(request_of(model, {**said, **options}), data)
    if isinstance(job, FileJob):
        from quark.jobs.run_file import run_file

        made = run_file(job).path
    else:
        from quark.jobs.kinds import kind_of

        result = kind_of(job).run(job)
        result.check_kept()
        made = result.path
    say_upload(made)
    return made


def _with_goal(model: Path, said: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a call with the goal of the kind of model, where they name none.

    Args:
        model: Path of the model.
        said: The words.
        options: Further ones, which are not in the result.
    """
    from quark.jobs.denoisers import holds_denoiser
    from quark.jobs.request import is_onnx

    if said["goal"]:
        return {**said}
    if is_onnx(model):
        # No program is known for an untried configuration, and none was asked for: it is made as --config makes it.
        found = {"scheme": None, "config": said["scheme"]} if _is_untried(said["scheme"]) else {"goal": "onnxruntime"}
        return {**said, **found}
    has_scheme = said["scheme"] is not None or said["bits"] is not None
    of_data = ("calib", "effort", "algorithm", "samples", "length", "packing", "seed", "synthetic")
    if has_scheme and not any({**said, **options}.get(name) is not None for name in of_data):
        said = {**said, "effort": FAST}  # a scheme alone is to nearest, as on the command line
    return {**said, "goal": "diffusers" if holds_denoiser(model) else IN_MEMORY}


def evaluate(
    float_model: str | os.PathLike[str],
    quantized: str | os.PathLike[str],
    *,
    data: Any = None,
    metric: str | None = None,
    **options: Any,
) -> MeasuredFolders | MeasuredFiles | MeasuredPipeline:
    """Run a float and a quantized model on the same held-out data, as `quark evaluate` does.

    Args:
        float_model: Folder of transformers, of a network or a pipeline of diffusers, a GGUF file or an ONNX file.
        quantized: The quantized model: a folder, a GGUF file or an ONNX file.
        data: Path of a text, of JSON lines, of a folder of images, audio or arrays, or of an .npz file.
        metric: Figure of a task beside those of the outputs: "choice", "exact_match", "loss", or "MODULE:FUNCTION" of a
            file in the current folder, whose code runs. None: what the data hold.
        options: Other options of `quark evaluate`: `windows=16`, `device="cuda"`; for ONNX files `samples=100`; for
            pipelines `prompt="a cat"` and `num_inference_steps=8`, which are used for pictures.

    Returns:
        The results: `outputs` (name of an output -> `sqnr`, `cosine`, `l2`, `psnr`), and `sizes` in bytes and
        `seconds` of both models. For folders also `comparison.perplexity` and `damage`, and for ONNX files
        `report.layers`. Where there is a task, `task.scores` (name of a figure -> that of the float and that of the
        quantized model), and `accuracy`, such a pair. For a pipeline `components` (name of a denoiser -> such results),
        and `pictures` (name of a denoiser -> `pictures`, `picture_sqnr`).

    Raises:
        DamageError: The quantized model is outside of `max_kl`, `max_perplexity` or `min_agreement`.
        QuarkError: An option is unknown, the models or the data cannot be read, or the two models do not match.
    """
    from quark.jobs.evaluate import (
        EVALUATE,
        EvaluateFiles,
        check_bounds,
        evaluate_files,
        evaluate_folders,
        evaluate_pipeline,
    )
    from quark.jobs.recipes.held_out import check_held_out
    from quark.jobs.request import is_pipeline, request_for

    with _spelled({}, EVALUATE):
        _refuse_of_command("evaluate", options)
        request = request_for(
            EVALUATE, float_model, {"data": data, "metric": metric, **options}, quantized=Path(quantized)
        )
        check_held_out(request)
        if isinstance(request, EvaluateFiles):
            return evaluate_files(request)
        pipelines = is_pipeline(request.model) or is_pipeline(request.quantized)
        if pipelines:
            return evaluate_pipeline(request)
        measured = evaluate_folders(request)
        check_bounds(request, measured)
        return measured


def compare(
    model: str | os.PathLike[str],
    schemes: str | Sequence[str],
    *,
    calib: Any = None,
    data: Any = None,
    **options: Any,
) -> ComparedSchemes:
    """Quantize a model with several schemes, and measure each result, as `quark compare` does.

    Args:
        model: Folder of transformers, a GGUF file, or an ONNX file. It is not changed, and no model is written.
        schemes: Names of schemes, GGUF mixes, families of schemes, or configurations for ONNX files.
        calib: Path of calibration data.
        data: Path of held-out data. Default: `calib`.
        options: Other options of `quark compare`.

    Returns:
        A row for the float model and one for each scheme, with `size` in bytes, `sqnr` in dB, `kl` and `perplexity`. If
        a scheme is not possible for the model, its row has a `reason`.

    Raises:
        QuarkError: An argument is wrong, data are missing, or no scheme can be used.
    """
    from quark.jobs.compare import COMPARE, check_bounds, resolve_comparison, run_comparison
    from quark.jobs.request import request_for

    with _spelled({}, COMPARE):
        _refuse_of_command("compare", options)
        said = {"schemes": schemes, "calib": calib, "data": data, **options}
        job = resolve_comparison(request_for(COMPARE, model, said))
        compared = run_comparison(job)
        check_bounds(job, compared)
        return compared


def convert(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str | None = None,
    *,
    requantize: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a quantized model in another format, with exactly the same values, as `quark convert` does.

    Args:
        model: A quantized folder, a GGUF file, or a safetensors file in FP8.
        output: Folder or file to write.
        format: "quark", "awq", "gptq", "fp8", "compressed-tensors" or "gguf"; for a GGUF file also "float", a model
            folder of float values, which is its default; for a safetensors file that alone, one file.
        requantize: Scheme or GGUF mix to quantize to again, if the format cannot store the codes.
        dtype: With "float": "float32", "float16", "bfloat16", or "auto" (default): 16 bits, to which values of blocks
            are rounded, if they hold the float tensors of the file.
        overwrite: Replace an existing output.

    Returns:
        The path that a program loads.

    Raises:
        QuarkError: The model cannot be read, the format cannot store it, or the output exists already.
    """
    from quark.goals.upload import say_upload
    from quark.jobs.convert import CONVERT, require_quantized_model, resolve_conversion, run_conversion
    from quark.jobs.request import request_for

    with _spelled(OF_CONVERT, CONVERT):
        said = {
            "output": output,
            "format": format,
            "requantize": requantize,
            "dtype": dtype,
            "force": overwrite or None,
        }
        request = request_for(CONVERT, model, said)
        require_quantized_model(request.model)
        made = run_conversion(resolve_conversion(request)).path
    say_upload(made)
    return made


def _refuse_of_command(command: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of what a command does beside its output."""
    if printed := sorted({*options} & {*OF_THE_COMMAND}):
        raise ConfigError(f"{', '.join(printed)}: of the command alone. Possible: `quark {command}`.")


def _is_untried(scheme: str | None) -> bool:
    """Return True for a configuration of ONNX files that no goal has a fact of."""
    from quark.goals.choice import is_known
    from quark.onnx.config.preset_rows import QROWS, ROWS  # imports onnx: the model is such a file

    return scheme is not None and (scheme in ROWS or scheme in QROWS) and not is_known(scheme, True)


@contextmanager
def _spelled(others: Mapping[str, str], kinds: Kinds[Any, Any] | None = None) -> Iterator[None]:
    """Within: errors name keywords, in the place of options of the command line.

    Args:
        others: Option -> keyword, where these differ.
        kinds: The requests of the command; None: those of `quark quantize`.
    """
    from quark.jobs.request import options_of

    known = {*options_of(*(kinds or ())), *others.values()}

    def keyword(flag: re.Match[str]) -> str:
        # Of its value too, where one stands after it; other words with dashes stay.
        name = others.get(flag[1], flag[1].replace("-", "_"))
        return flag[0] if name not in known else f"{name}=" if flag[2] else name

    try:
        yield
    except QuarkError as error:
        error.args = tuple(re.sub(r"--([a-z][a-z-]*)( (?=['\d]))?", keyword, str(part)) for part in error.args)
        raise


def _module(
    model: Any,
    scheme: str | None,
    data: Any,
    goal: str | None,
    output: Any,
    bits: float | None,
    effort: str | None,
    words: tuple[str, ...] | None,
    exclude: list[str],
    overwrite: bool,
    options: Mapping[str, Any],
) -> Any:
    """Quantize a module, in place."""
    from quark.base.libraries.transformers import is_transformers_model
    from quark.gguf import MIXES
    from quark.goals import GoalRequest, choose
    from quark.goals.upload import say_upload
    from quark.jobs.configure_folder import check_module, for_goal
    from quark.jobs.words import torch_algorithms
    from quark.torch import LLMTemplate, ModelQuantizer, export_gguf, export_safetensors, gguf_config
    from quark.torch.config.llm_template import default_exclusions
    from quark.torch.model.meta_model import meta_copy
    from quark.torch.plan import divides
    from quark.torch.writers.adapters import refuse_adapted

    if options:
        raise ConfigError(f"{', '.join(options)}: of a folder or a file only. Possible: its path, or quark.torch.")
    has_data = data is not None
    scheme = scheme if scheme or goal or bits else _scheme_of(model, has_data)
    chosen = choose(GoalRequest(
        goal=goal or IN_MEMORY, scheme=scheme, bits=bits, effort=effort, algorithms=words, has_data=has_data
    ))  # fmt: skip
    chosen = _of_kind(chosen, model)
    folder = getattr(model, "name_or_path", "")
    _check_kind(chosen, output, folder)
    if output is not None:
        refuse_adapted(model, "An adapter of PEFT is in the model")
    if chosen.distills and has_data:
        chosen, data = _completed(chosen, model, data)
    algorithms = torch_algorithms(chosen.algorithms) or None
    if chosen.scheme in MIXES:
        config = gguf_config(model, chosen.scheme, algorithms, exclude)
    else:
        kind = getattr(getattr(model, "config", None), "model_type", None) or "auto"
        template, kept = LLMTemplate.get(kind), [*default_exclusions(kind), *exclude]
        chosen = chosen.fitted(lambda name: divides(template.get_config(name, exclude_layers=kept), model))
        config = template.get_config(chosen.scheme, algorithms, exclude_layers=kept)
        if is_transformers_model(model):
            config = for_goal(lambda: model, config, chosen)
            check_module(meta_copy(model), config, chosen)
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_as_planned(model, data))
    if output is None:
        return made
    path = Path(output)
    if chosen.form == "gguf":
        path = export_gguf(made, path.parent, path.stem, folder, overwrite=overwrite)
    else:
        reader, name = chosen.goal.reader, chosen.goal.name
        export_safetensors(made, path, chosen.form, overwrite=overwrite, reader=reader, goal=name)
    say_upload(path)
    return made


def _of_kind(chosen: Any, model: Any) -> Any:
    """Return the choice for the kind of a module in memory; see `GoalChoice.of_other_model`."""
    from quark.base.libraries.transformers import is_transformers_model
    from quark.torch.calibration.synthetic_data import writes_text

    if not is_transformers_model(model) or writes_text(model):
        return chosen
    return chosen.of_other_model(type(model).__name__, sentences=False)


def _completed(chosen: Any, model: Any, data: Any) -> tuple[Any, Any]:
    """Return the choice with the further steps of an effort for a module in memory, and the data with its own texts."""
    from quark.jobs.folders.best_effort import completed_for, say_completed
    from quark.jobs.folders.calibration import Calibration
    from quark.torch.model.batches import input_device, longest_in, tokens_in

    data = data if isinstance(data, Sequence) else list(data)
    tokens, length = tokens_in(data), longest_in(data)
    why = None if tokens else "the data are no token ids"
    chosen = completed_for(chosen, model, tokens, length, str(input_device(model)), why=why)
    say_completed(chosen)
    return chosen, Calibration(synthetic=chosen.texts or None, asked=False).with_synthetic(model, data)


def _check_kind(chosen: Any, output: Any, folder: str) -> None:
    """Raise ConfigError for what is made of a folder, and not of a module: a mix, and files that need more."""
    if chosen.mixed is not None:
        raise ConfigError(
            "A budget for a module: a mix is chosen for a folder. Possible: its path, or "
            "quark.torch.bit_budget.measure.measure_sensitivity."
        )
    if output is not None and chosen.form == "onnx":
        raise ConfigError("An ONNX file of a module needs inputs: quark.torch.export_onnx(model, folder, inputs).")
    if output is not None and chosen.form == "gguf" and not folder:
        raise ConfigError("A GGUF file needs a tokenizer: quark.torch.export_gguf(model, folder, name, tokenizer).")


def _scheme_of(model: Any, has_data: bool) -> str | None:
    """8 bits for a module that transformers does not know: groups of 128 do not divide a convolution's channels."""
    named = getattr(getattr(model, "config", None), "model_type", None) is not None
    if named:
        return None
    return "int8" if has_data else "int8_wo"
