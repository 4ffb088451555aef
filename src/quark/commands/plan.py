"""`quark plan`: which layer would get what, and how large the result would be, without loading a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.command_line import results
from quark.commands.folders.bit_budget import (
    BITS_HELP,
    CANDIDATES_HELP,
    SENSITIVITY_HELP,
    SIZE_HELP,
    asked_budget,
    choice_table,
    choose_for_budget,
)
from quark.commands.folders.calibration import Calibration, LengthOption, PackingOption, SeedOption
from quark.commands.goals import (
    EffortOption,
    GoalOption,
    asked_choice,
    choice_rows,
    fitted_choice,
    onnx_config,
    serve_line,
)
from quark.commands.options.kinds import check_options, folder_option, is_onnx, require, require_model
from quark.commands.options.log_file import LogFileOption, check_log_file, say_first
from quark.commands.options.words import check_words, layer_schemes, torch_algorithms, usage
from quark.errors import UsageError
from quark.progress import log_to


def plan(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(help="Folder of a Hugging Face model (config.json is enough), or an ONNX file."),
    ],
    goal: GoalOption = None,
    effort: EffortOption = None,
    scheme: Annotated[
        str | None,
        typer.Option("--scheme", "--config", help="A scheme or a configuration; `quark schemes` lists them."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Pattern of layers to keep in float; repeatable.")] = None,
    layer: Annotated[list[str] | None, folder_option(help="PATTERN=SCHEME for some layers; repeatable.")] = None,
    bits: Annotated[float | None, typer.Option(min=0, help=BITS_HELP)] = None,
    size: Annotated[str | None, typer.Option(help=SIZE_HELP)] = None,
    candidates: Annotated[list[str] | None, typer.Option(help=CANDIDATES_HELP)] = None,
    sensitivity: Annotated[Path | None, typer.Option(help=SENSITIVITY_HELP)] = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration data, as `quark quantize` takes them.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Most samples of --calib. Default 128.")] = None,
    length: LengthOption = None,
    packing: PackingOption = None,
    seed: SeedOption = None,
    log_file: LogFileOption = None,
    device: Annotated[str, folder_option(help="Where --bits and --size measure: cpu, cuda ...")] = "cpu",
) -> None:
    """Show what a scheme, or a budget, would do to a model, and the size it would have.

    With --bits or --size the weights are read, and calibration data or a file of sensitivities are needed.

    Example: quark plan ./llama --scheme mxfp4

    Example: quark plan ./llama --for llama.cpp --bits 8

    Example: quark plan model.onnx --config A8W8

    Example: quark plan ./llama --bits 4.25 --calib heldout.txt --sensitivity llama.json
    """
    # Before the libraries load: a wrong path or word is answered at once.
    onnx = is_onnx(model)
    check_options(context, model)
    if onnx and goal is None and (bits, size, candidates, sensitivity) != (None,) * 4:
        raise UsageError(
            "Of an ONNX file a configuration says the bits. Possible: --config NAME, or --for GOAL --bits N."
        )
    require_model(model)
    check_log_file(log_file, str(model), [calib, sensitivity])
    with usage():
        if goal is None and not onnx:
            check_words([scheme, *layer_schemes(layer)])
        choice = asked_choice(
            goal, effort, model, onnx, scheme=scheme, bits=bits, size=size, form=None, algorithms=None,
            has_data=calib is not None, candidates=candidates, sensitivity=sensitivity,
        )  # fmt: skip
    amount = f"{bits:g} bits" if bits is not None else size
    say_first("Planning", model, scheme or amount, f"for {goal}" if goal else None)
    console = results()
    if choice is not None and not onnx:
        choice = fitted_choice(choice, model, exclude, layer)
    if choice is not None:
        console.print(choice_rows(choice))
    if onnx:
        from quark.commands.onnx_files.plan import plan_file

        plan_file(model, onnx_config(choice) if choice else scheme, calib is not None, exclude)
        if choice is not None:
            console.print(serve_line(choice, "OUT.onnx"), highlight=False, soft_wrap=True)
        return
    # The flow imports torch: after the arguments are parsed, so that --help is instant.
    from quark.commands.folders.models import inputs_of, load_meta_model
    from quark.commands.folders.quantize import budget_base, config_of, config_of_choice, scheme_config, with_default
    from quark.torch.checkpoint.shards import predicted_bytes
    from quark.torch.flows.check_plan import check_plan
    from quark.torch.flows.predicted_size import planned

    calibration = Calibration(calib, samples, length, packing, seed)
    form, budget = choice.form if choice else "quark", None
    if choice is None:
        budget = asked_budget(model, scheme, bits, size, candidates, sensitivity)
    elif choice.mixed is not None:
        budget = asked_budget(model, None, bits, size, list(choice.mixed), sensitivity, form, choice.goal)
    if budget is not None:
        config = budget_base(budget, exclude, layer)
    elif choice is not None:
        algorithms = torch_algorithms(choice.algorithms) or None
        config = config_of(model, choice.scheme, form, exclude, layer, algorithms)
    else:
        config = scheme_config(require(scheme, "--scheme or --for", model), exclude, layer)
    named = None if budget else choice.scheme if choice else scheme
    calibration = with_default(calibration, named, layer, [], config, budget)
    if budget is not None:
        with log_to(log_file):
            table, chosen = choose_for_budget(model, budget, config, calibration, device)
        config = config_of_choice(model, budget, table, chosen, config, layer)
        console.print(choice_table(table, chosen))
    meta = load_meta_model(model)
    before = predicted_bytes(meta, None)
    made, after = planned(meta, config, form)
    layers = made.table(meta)
    check_plan(meta, config, made, form)
    console.print(layers)
    console.print(f"size: {before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})", highlight=False)
    inputs = inputs_of(model, meta)
    if calibration.is_default and not inputs.reads_text:
        console.print("data: needed, and not given (--calib)", highlight=False)
    elif budget is None and (data := calibration.samples_of(inputs)) is not None:
        console.print(f"data: {calibration.described(data)}", highlight=False, soft_wrap=True)
    if choice is not None:
        out = "OUT.gguf" if form == "gguf" else "OUT/quark_model.onnx" if form == "onnx" else "OUT"
        console.print(serve_line(choice, out), highlight=False, soft_wrap=True)
