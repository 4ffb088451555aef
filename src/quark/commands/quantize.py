"""`quark quantize`: a model folder or an ONNX file in, a quantized one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.command_line import results
from quark.commands.folders.bit_budget import BITS_HELP, CANDIDATES_HELP, SENSITIVITY_HELP, SIZE_HELP, asked_budget
from quark.commands.folders.calibration import Calibration, LengthOption, PackingOption, SeedOption, SyntheticOption
from quark.commands.goals import EffortOption, GoalOption, asked_choice, fitted_choice, onnx_config, serve_line
from quark.commands.options.kinds import check_options, folder_option, is_onnx, onnx_option, require, require_model
from quark.commands.options.log_file import LogFileOption, check_log_file, say_first
from quark.commands.options.processes import together
from quark.commands.options.words import (
    FILE_FORMS,
    check_words,
    each_algorithm,
    layer_schemes,
    onnx_algorithms,
    torch_algorithms,
    usage,
)
from quark.commands.recipes.recipe import Recipe, check_recipe, save_recipe
from quark.commands.results.quantized import check_report
from quark.errors import OutputError
from quark.goals.efforts import FAST
from quark.log import logger
from quark.progress import log_to

Model = Annotated[Path, typer.Argument(help="Folder of a Hugging Face model, or an ONNX file.")]
# Not a Path, which an empty word and a slash at the end are lost to.
Output = Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="Folder or file to make.")]
Calib = Annotated[
    Path | None,
    typer.Option(
        help="Calibration data: text, JSON lines (.jsonl), datasets:NAME, a folder of images or audio, or arrays "
        "by name (.npz). Without them language models get a text of the package."
    ),
]
Samples = Annotated[int | None, typer.Option(min=1, help="Most samples of --calib. Default 128; ONNX: all.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Pattern of layers or nodes to keep in float; repeatable.")]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a page (HTML) of what was found.")
]
WriteRecipe = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was asked for as a recipe, which `quark run` takes.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the output.")]

Scheme = Annotated[str | None, folder_option(help="Name of a scheme; `quark schemes` lists them.")]
Bits = Annotated[float | None, folder_option(min=0, help=BITS_HELP)]
Size = Annotated[str | None, folder_option(help=SIZE_HELP)]
Candidates = Annotated[list[str] | None, folder_option(help=CANDIDATES_HELP)]
SensitivityFile = Annotated[Path | None, folder_option("--sensitivity", help=SENSITIVITY_HELP)]
Layer = Annotated[list[str] | None, folder_option(help="PATTERN=SCHEME for some layers; repeatable.")]
Algorithm = Annotated[
    list[str] | None,
    typer.Option(
        help="gptq, awq ..., or gptq:refine_passes=3,NAME=VALUE; `quark algorithms` lists them; repeatable.",
        callback=each_algorithm,
    ),
]
Imatrix = Annotated[
    Path | None, folder_option(help="Importance matrix of llama.cpp, which weighs the errors of a GGUF mix.")
]
SaveImatrix = Annotated[
    Path | None, folder_option(help="Write the importance matrix of --calib: NAME.gguf, or the older NAME.dat.")
]
KvCache = Annotated[
    str | None, folder_option(help="Quantize the key and value cache: fp8, int8, fp8_per_head, int8_per_head.")
]
Attention = Annotated[str | None, folder_option(help="Quantize queries and attention probabilities: fp8.")]
Device = Annotated[str, folder_option(help="cpu, cuda, cuda:1 ...")]
Dtype = Annotated[str, folder_option(help="Compute in float32, float16, bfloat16; auto: as stored.")]
GGUF, _ = FILE_FORMS
ExportFormat = Annotated[
    str | None,
    folder_option(
        "--export-format", "--format",
        help="quark (default), awq, gptq, fp8, compressed-tensors; gguf, onnx (a file). Default for -o X.gguf: gguf.",
    ),
]  # fmt: skip
WeightFormat = Annotated[str, folder_option(help="real_quantized or fake_quantized.")]
PackMethod = Annotated[str, folder_option(help="Order of 4-bit codes: reorder or order.")]
Stream = Annotated[
    bool | None,
    folder_option(
        help="Load, quantize and write one block at a time; a killed run goes on. Default: where memory is too small, "
        "and tensor by tensor where no data are needed."
    ),
]
TrustRemoteCode = Annotated[
    bool, folder_option("--trust-remote-code", help="Run the code that the folder brings along.")
]
KeepUnexpected = Annotated[
    bool,
    folder_option(
        "--keep-unexpected",
        help="Accept tensors that the class of the model does not use; they are copied as they are.",
    ),
]
ShardSize = Annotated[str, folder_option(help="Largest safetensors file.")]

Config = Annotated[
    str | None,
    onnx_option(
        help="Named configuration: A8W8, XINT8 ... Default: for ONNX Runtime on this CPU, the best found in a minute."
    ),
]
Target = Annotated[
    str | None,
    onnx_option(
        help="Layout to write: npu, ort_x64, ort_arm64, openvino, generic. --for chooses it, and the configuration too."
    ),
]
Statistics = Annotated[Path | None, onnx_option(help="File of calibration statistics, written or reused.")]
BatchSize = Annotated[int | None, onnx_option(min=1, help="Rows of --calib in a sample.")]
Mean = Annotated[str | None, onnx_option(help="Of images: (image / 255 - mean) / std, as in 0.5 or 0.4,0.5,0.6.")]
Std = Annotated[str | None, onnx_option(help="Of images, with --mean.")]
AllowNoop = Annotated[
    bool | None,
    onnx_option(
        "--allow-noop/--no-allow-noop",
        help="Whether an algorithm that finds nothing to do is a warning (default) or an error.",
    ),
]
AllowDamage = Annotated[
    bool,
    onnx_option("--allow-damage", help="Write a model that lost its outputs on calibration samples."),
]
Recover = Annotated[
    bool,
    onnx_option("--recover", help="Try other ranges and algorithms; keep what helps on samples that are held out."),
]
Budget = Annotated[str | None, onnx_option(help="Time for --recover: 90s, 10m (default), 1h ...")]
AllowWider = Annotated[bool, onnx_option("--allow-wider", help="Of --recover: more bits than the config asks for.")]
Reach = Annotated[float | None, onnx_option(help="Of --recover: the metric that is enough, as in 30 (dB of sqnr).")]
Metric = Annotated[str | None, onnx_option(help="Of --recover: sqnr (default), psnr, cosine or l2.")]

Measure = Annotated[
    bool | None,
    onnx_option(
        "--measure/--no-measure",
        help="Time the kernels of this processor, and leave in float what is faster so; for --target ort_x64.",
    ),
]
Profile = Annotated[Path | None, onnx_option(help="File of these times, written or reused; with --measure.")]


def quantize(
    context: typer.Context,
    model: Model,
    output: Output,
    goal: GoalOption = None,
    effort: EffortOption = None,
    calib: Calib = None,
    samples: Samples = None,
    exclude: Exclude = None,
    length: LengthOption = None,
    packing: PackingOption = None,
    seed: SeedOption = None,
    synthetic: SyntheticOption = None,
    write_recipe: WriteRecipe = None,
    force: Force = False,
    report: ReportFile = None,
    log_file: LogFileOption = None,
    scheme: Scheme = None,
    bits: Bits = None,
    size: Size = None,
    candidates: Candidates = None,
    sensitivity: SensitivityFile = None,
    layer: Layer = None,
    algorithm: Algorithm = None,
    imatrix: Imatrix = None,
    save_imatrix: SaveImatrix = None,
    kv_cache: KvCache = None,
    attention: Attention = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    export_format: ExportFormat = None,
    weight_format: WeightFormat = "real_quantized",
    pack_method: PackMethod = "reorder",
    max_shard_size: ShardSize = "5GB",
    stream: Stream = None,
    trust_remote_code: TrustRemoteCode = False,
    keep_unexpected: KeepUnexpected = False,
    config: Config = None,
    target: Target = None,
    statistics: Statistics = None,
    batch_size: BatchSize = None,
    mean: Mean = None,
    std: Std = None,
    allow_noop: AllowNoop = None,
    allow_damage: AllowDamage = False,
    recover: Recover = False,
    budget: Budget = None,
    metric: Metric = None,
    reach: Reach = None,
    measure: Measure = None,
    profile: Profile = None,
    allow_wider: AllowWider = False,
) -> None:
    """Quantize a model folder for transformers and vLLM, or an ONNX file for ONNX Runtime and NPUs.

    Example: quark quantize ./llama --for vllm -o ./llama-vllm

    Example: quark quantize ./llama --scheme uint4_wo_128 -o ./llama-uint4

    Example: quark quantize ./llama --bits 4.25 --calib heldout.txt -o ./llama-4.25

    Example: quark quantize ./llama --scheme q4_k_m --export-format gguf --calib heldout.txt -o llama-q4_k_m.gguf

    Example: quark quantize model.onnx --for onnxruntime --calib samples.npz -o fast.onnx

    Example: quark quantize model.onnx --config A8W8 --calib samples.npz -o model-a8w8.onnx

    Example: quark quantize model.onnx --config A8W8 --calib samples.npz --recover --reach 30 -o best.onnx
    """
    # With a goal, --scheme and --bits say of either kind of model what it is to be.
    check_options(context, model, ("scheme", "bits") if goal is not None else ())
    if not output:
        raise OutputError("--output '' is no path. Possible: the name of a folder, or of a file for an ONNX model.")
    require_model(model)
    onnx = is_onnx(model)
    if export_format is None and not onnx and goal is None and Path(output).suffix == f".{GGUF}":
        export_format = GGUF
    check_log_file(log_file, output, [model, calib, imatrix, sensitivity, statistics, profile, report, save_imatrix])
    amount = f"{bits:g} bits" if bits is not None else size
    words = [scheme or config or amount, f"for {goal}" if goal else None, *(algorithm or [])]
    say_first("Quantizing", model, *words, output=output)
    with usage():
        if goal is None and not onnx:
            check_words([scheme, *layer_schemes(layer)], export_format, algorithm, dtype)
        choice = asked_choice(
            goal, effort, model, onnx, scheme=scheme or config, bits=bits, size=size, form=export_format,
            algorithms=algorithm, has_data=calib is not None, trust_remote_code=trust_remote_code,
            candidates=candidates, sensitivity=sensitivity, kv_cache=kv_cache,
        )  # fmt: skip
    if choice is not None:
        with usage():
            target = choice.target_with(target)
        logger.info("For %s: %s as %s, because: %s.", choice.goal.program, *choice.summary())
    form = choice.form if choice is not None else export_format or "quark"
    check_report(report, model, output, calib, form, force)
    recipe: Recipe | None = Recipe.given(context)
    check_recipe(write_recipe, output, force, model, calib, report, log_file)
    files = {"report": report, "log_file": log_file, "write_recipe": write_recipe, "save_imatrix": save_imatrix}
    with log_to(log_file), together(onnx, form, **files):
        # Each flow imports its libraries: after the arguments are parsed, so that --help is instant.
        if onnx:
            from quark.commands.onnx_files.quantize import Timing, calibration_reader, quantize_onnx
            from quark.commands.onnx_files.recover import asked, recovery_of

            reader = calibration_reader(model, calib, batch_size, mean, std)
            if choice is not None:
                config = onnx_config(choice)
            recovery = asked(recover, budget, metric, reach, allow_wider)
            if choice is not None:
                recovery = recovery or recovery_of(choice.effort, reader is not None)
            timing = Timing(measure, profile)
            quantize_onnx(
                model, output, config, reader, samples, exclude, target, statistics, force, allow_noop=allow_noop,
                allow_damage=allow_damage, recovery=recovery, timing=timing, algorithms=onnx_algorithms(algorithm),
                quick=choice is None or choice.effort != FAST, page=report,
            )  # fmt: skip
            save_recipe(write_recipe, recipe)
            if choice is not None:
                results().print(serve_line(choice, output), highlight=False, soft_wrap=True)
            return
        from quark.commands.folders.export import Export
        from quark.commands.folders.imatrix import Imatrices
        from quark.commands.folders.quantize import quantize_folder

        export = Export(Path(output), form, weight_format, pack_method, max_shard_size, force)
        if choice is not None:
            export.check_output(model, calib)  # before the model is looked at
            choice = fitted_choice(choice, model, exclude, layer, trust_remote_code)
        named, bit_budget = choice.scheme if choice is not None else None, None
        if choice is None:
            bit_budget = asked_budget(model, scheme, bits, size, candidates, sensitivity, form)
        elif choice.mixed is not None:
            bit_budget = asked_budget(model, None, bits, size, list(choice.mixed), sensitivity, form, choice.goal)
        recipe = quantize_folder(
            model, bit_budget or named or require(scheme, "--scheme or --for", model),
            calibration=Calibration(calib, samples, length, packing, seed, synthetic), recipe=recipe, exclude=exclude,
            layer=layer, kv_cache=kv_cache, attention=attention, device=device, dtype=dtype,
            algorithm=torch_algorithms(choice.algorithms if choice else algorithm) or None, stream=stream,
            imatrix=Imatrices(imatrix, save_imatrix, force), export=export, page=report,
            load={"trust_remote_code": trust_remote_code, "keep_unexpected": keep_unexpected},
        )  # fmt: skip
        save_recipe(write_recipe, recipe)
        if choice is not None:
            results().print(serve_line(choice, export.made(model)), highlight=False, soft_wrap=True)
