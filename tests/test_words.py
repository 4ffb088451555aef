"""Words of the field in names and texts, and no short function that a reader must jump to once."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_tree import FILES, parsed, relative

# Each has a word of the field: after, kept, compared, copy, equal, shown, candidate, and, large.
DENIED = [
    "alike", "aloud", "behind", "besides", "held", "judge", "judged", "judges", "judging", "lent", "loud", "rival",
    "rivals", "twin", "twins",
]  # fmt: skip

# Documented names that have one: file -> words.
DOCUMENTED = {"jobs/folders/bit_budget.py": ["alike"], "torch/bit_budget/measure.py": ["alike"]}

# Private functions of a few lines that are called once, and why each stands by itself.
_COMPLEX = "where it is called there would be more than fifteen paths"
_EACH = "of each entry of a comprehension or lambda"
_STEPS = "a question of several steps, asked where its answer is needed"
_PART = "a part, by its name, of what is put together of several"
STAND_ALONE = {
    "base/command_line.py:_bringing": _STEPS,
    "base/command_line.py:_open_descriptors": "tests close descriptors around it",
    "base/files.py:_holds": _COMPLEX,
    "base/files.py:_is_hub_name": _STEPS,
    "commands/options/of_request.py:_default": _EACH,
    "commands/options/of_request.py:_of_typer": _EACH,
    "compat/onnx_tools/shift_codes.py:_is_one_int8_scale": _COMPLEX,
    "core/observers/real_rows.py:_axis": _COMPLEX,
    "errors.py:_is_installed": _EACH,
    "gguf/configs.py:_special_tokens": _PART,
    "gguf/types.py:_whole_blocks": _STEPS,
    "gguf/vocabularies/sentencepiece.py:_refuse_inner_spaces": _COMPLEX,
    "goals/choice.py:_takes_none": _COMPLEX,
    "jobs/evaluate.py:_is_quantized": _COMPLEX,
    "jobs/folders/pipeline.py:_check_names": _COMPLEX,
    "jobs/resolve.py:_check_amount": _COMPLEX,
    "one_call.py:_is_untried": _COMPLEX,
    "one_call.py:_scheme_of": _COMPLEX,
    "onnx/algorithms/rescaling/cle.py:_is_one_position": _COMPLEX,
    "onnx/algorithms/rescaling/cle.py:_reads_channels": _COMPLEX,
    "onnx/algorithms/rescaling/quarot.py:_tables": _COMPLEX,
    "onnx/algorithms/rescaling/quarot.py:_written": _COMPLEX,
    "onnx/algorithms/rescaling/smooth_quant.py:_is_quantized_before": _COMPLEX,
    "onnx/algorithms/rescaling/smooth_quant.py:_linear_readers": _COMPLEX,
    "onnx/calibration/calibrate.py:_all_tensors": _COMPLEX,
    "onnx/calibration/data/padding.py:Padding._axes_of_rows": _COMPLEX,
    "onnx/calibration/data/sample_batches.py:_first_open": _EACH,
    "onnx/calibration/data/sample_batches.py:_joined": _EACH,
    "onnx/calibration/joined_ends.py:_costs_a_part": _EACH,
    "onnx/calibration/left_in_float.py:_carries_mask": _EACH,
    "onnx/calibration/sliced_session.py:_rounds_by_layout": _STEPS,
    "onnx/config/lowering/algorithms.py:_finetune": _COMPLEX,
    "onnx/config/lowering/algorithms.py:_merged": _EACH,
    "onnx/config/lowering/lower.py:_float16_becomes_float32": _COMPLEX,
    "onnx/config/lowering/specs.py:_op_types": _COMPLEX,
    "onnx/evaluation/compare_models.py:_apart": _COMPLEX,
    "onnx/evaluation/cpu_price.py:_decoder": _EACH,
    "onnx/evaluation/cpu_price.py:_is_absorbed": _EACH,
    "onnx/evaluation/cpu_price.py:_stays": _EACH,
    "onnx/evaluation/ort_fusion.py:_is_quantized": _EACH,
    "onnx/flow/float_bodies.py:_known_values": _COMPLEX,
    "onnx/flow/prepare.py:_half_scale": _EACH,
    "onnx/flow/prepare.py:_runs": _COMPLEX,
    "onnx/graph/masks.py:_either": _COMPLEX,
    "onnx/graph/masks.py:_only_for": _COMPLEX,
    "onnx/graph/masks.py:_product": _COMPLEX,
    "onnx/graph/model_file.py:_agree": _COMPLEX,
    "onnx/graph/model_file.py:_gives_list": _STEPS,
    "onnx/graph/model_file.py:_only_folder": _STEPS,
    "onnx/graph/norms.py:_is_of_last_axis": _COMPLEX,
    "onnx/graph/output_parts.py:_axis_of": _COMPLEX,
    "onnx/graph/output_parts.py:_has_concat": _EACH,
    "onnx/graph/output_parts.py:_shifted": _EACH,
    "onnx/graph/output_parts.py:_sizes": _COMPLEX,
    "onnx/npu/positions.py:Positions._has_position": _EACH,
    "onnx/npu/rules.py:_gates": _STEPS,
    "onnx/npu/simulation.py:_over_batch": _STEPS,
    "onnx/passes/convert_nchw_to_nhwc.py:_is_nhwc": _EACH,
    "onnx/passes/fix_shapes.py:_substitute": _COMPLEX,
    "onnx/passes/fold_batch_norm.py:_channels": _COMPLEX,
    "onnx/passes/fold_batch_norm.py:_is_per_channel": _COMPLEX,
    "onnx/passes/fold_batch_norm.py:_joins_channels": _COMPLEX,
    "onnx/passes/fold_factors.py:_is_added": _COMPLEX,
    "onnx/passes/fuse_l2_norm.py:_is_tiny": _EACH,
    "onnx/passes/hoist_constants.py:_before_identities": _COMPLEX,
    "onnx/passes/hoist_constants.py:_is_large": _COMPLEX,
    "onnx/passes/simplify.py:_is_known": _EACH,
    "onnx/passes/split_large_pool.py:_first_kernel": _STEPS,
    "onnx/placement/channel_scales.py:_is_coarse": _STEPS,
    "onnx/placement/constants.py:_in_integers": _COMPLEX,
    "onnx/placement/constants.py:_operand_spec": _COMPLEX,
    "onnx/placement/kernels.py:_keeps_orders": _STEPS,
    "onnx/qdq/constants.py:ConstantStore._balances": _STEPS,
    "onnx/qdq/constants.py:ConstantStore._folds": _STEPS,
    "onnx/search/latency/kernels.py:_by_node": _EACH,
    "onnx/search/latency/kernels.py:_text": _EACH,
    "onnx/search/latency/measure.py:_name_last_nodes": _COMPLEX,
    "onnx/search/latency/noise_sample.py:_shape": _EACH,
    "onnx/search/latency/profile_file.py:Profile._to_run": _COMPLEX,
    "onnx/search/mixed_precision/auto_mixprecision.py:_needed": _COMPLEX,
    "onnx/search/mixed_precision/auto_mixprecision.py:_orders": _COMPLEX,
    "onnx/search/mixed_precision/candidates.py:_kind": _EACH,
    "onnx/search/mixed_precision/switched.py:_switchable": _EACH,
    "onnx/search/noise/choices.py:_among": _EACH,
    "onnx/search/noise/sensitivity.py:OutputNoise._removed": _EACH,
    "onnx/search/noise/sensitivity.py:Probe._relative_of": _EACH,
    "onnx_ops/compact.py:_declared": _COMPLEX,
    "onnx_ops/operators.py:_declared": _EACH,
    "onnx_ops/saving.py:_files_in": _EACH,
    "onnx_ops/saving.py:_named_by_others": _COMPLEX,
    "torch/algorithms/block_sweep.py:_read_and_measured": _COMPLEX,
    "torch/algorithms/block_sweep.py:_with_quantized_weights": _COMPLEX,
    "torch/algorithms/input_group.py:_has_tiles": "tests put another processor in its place",
    "torch/algorithms/input_group.py:_mirror": _COMPLEX,
    "torch/algorithms/keep_better.py:_static_quantizers": _COMPLEX,
    "torch/algorithms/rotation/block.py:_to_quantize": _COMPLEX,
    "torch/algorithms/rotation/value_heads.py:_on_cpu": _COMPLEX,
    "torch/algorithms/rounding/distillation.py:_together": "with _shape and _rows, it says what a batch may be",
    "torch/algorithms/rounding/gptq.py:_Solver._offset": _COMPLEX,
    "torch/algorithms/rounding/learned_rounding.py:_each_once": _COMPLEX,
    "torch/algorithms/scaling/find_folds.py:_Search._other_readers": _COMPLEX,
    "torch/bit_budget/measure.py:_bounds": _COMPLEX,
    "torch/calibration/expert_tokens.py:_channels": _COMPLEX,
    "torch/calibration/reached.py:_add_empty": _COMPLEX,
    "torch/calibration/reached.py:_has_own_code": _STEPS,
    "torch/calibration/reached.py:_noting": "makes a function of its own for each quantizer",
    "torch/calibration/work_device.py:_may_move": _EACH,
    "torch/checkpoint/carried.py:_refuse_data": _COMPLEX,
    "torch/checkpoint/hooks/of_transformers.py:_excludes": _EACH,
    "torch/checkpoint/hooks/of_transformers.py:_is_quantized": _EACH,
    "torch/checkpoint/quantization_config.py:_branched": _PART,
    "torch/checkpoint/shards.py:_is_shared": _COMPLEX,
    "torch/checkpoint/shards.py:_quantized_entry": "makes a function of its own for each quantizer",
    "torch/checkpoint/shards.py:_rotation_entry": "makes a function of its own for each rotation",
    "torch/checkpoint/sources/claims.py:_is_shown": _STEPS,
    "torch/checkpoint/sources/encodings/torchao.py:_matrix": _EACH,
    "torch/checkpoint/sources/source.py:Source._holds_values": _COMPLEX,
    "torch/checkpoint/sources/source.py:Source._is_scale": _STEPS,
    "torch/checkpoint/stored_tensors.py:_fits": _STEPS,
    "torch/checkpoint/stored_tensors.py:_is_rotation": _STEPS,
    "torch/config/config.py:_layer_type": _EACH,
    "torch/config/config_schema.py:_is_positive": _EACH,
    "torch/config/llm_template.py:LLMTemplate._default_exclude": _COMPLEX,
    "torch/config/llm_template.py:LLMTemplate._siblings": _COMPLEX,
    "torch/config/lowering.py:_element": _COMPLEX,
    "torch/config/lowering.py:_first_threshold": _COMPLEX,
    "torch/config/lowering.py:_scale_type": _COMPLEX,
    "torch/flows/check_plan.py:_listed": _EACH,
    "torch/flows/check_plan.py:_of_other_type": _COMPLEX,
    "torch/flows/float_layers.py:_built_in_float": _COMPLEX,
    "torch/flows/weights_on_disk.py:_require_values": _COMPLEX,
    "torch/flows/resume.py:_series": _EACH,
    "torch/formats/compressed_tensors/format.py:_group_of": _EACH,
    "torch/formats/compressed_tensors/format.py:_kind": _EACH,
    "torch/formats/fused_groups.py:_reading_one": _EACH,
    "torch/formats/gptq/auto_round.py:_dynamic": _COMPLEX,
    "torch/formats/gptq/auto_round.py:_form": _COMPLEX,
    "torch/formats/layout.py:_by_rows": _EACH,
    "torch/formats/readers.py:_float_names": _COMPLEX,
    "torch/graph/archived_code.py:_is_arithmetic": _STEPS,
    "torch/graph/plan.py:_check_shape": _COMPLEX,
    "torch/graph/plan.py:_nothing_to_quantize": _COMPLEX,
    "torch/graph/plan.py:_only_softmax_reads": _EACH,
    "torch/graph/quantize.py:_is_exported": _STEPS,
    "torch/graph/quantizers/kv_cache.py:_product_before": "stands beside _product_after",
    "torch/kernels/accelerate.py:_fastest_ways": _EACH,
    "torch/kernels/accelerate.py:_has_scales_in_rows": _STEPS,
    "torch/layers/attention/cache_rules.py:_only_ends_so": _EACH,
    "torch/layers/attention/cache_view.py:_makers": _EACH,
    "torch/model/blocks/offloaded_part.py:OffloadedPart._has_others": _STEPS,
    "torch/model/blocks/offloaded_part.py:_fitting_home": _COMPLEX,
    "torch/model/blocks/offloading.py:_make_parts": _PART,
    "torch/model/blocks/recording.py:_is_reached": _EACH,
    "torch/model/blocks/recording.py:_is_stack": _EACH,
    "torch/model/blocks/recording.py:_sequence_around_hidden": _STEPS,
    "torch/model/blocks/recording.py:_suffice": _STEPS,
    "torch/model/calibration_data/batches.py:_has_length": _STEPS,
    "torch/model/calibration_data/recorded_steps.py:_text_encoders": _COMPLEX,
    "torch/model/calibration_data/stored_batches.py:_stored_dtype": _STEPS,
    "torch/model/calibration_data/unpadding.py:_labelled": _COMPLEX,
    "torch/model/calibration_data/unpadding.py:_own_axes": _COMPLEX,
    "torch/model/calibration_data/unpadding.py:_patches": _COMPLEX,
    "torch/model/half_products.py:_Widened._lacked_by": _STEPS,
    "torch/model/model_folder.py:_remote": _COMPLEX,
    "torch/model/model_folder.py:_said_beside": _COMPLEX,
    "torch/model/model_folder.py:_usual": _COMPLEX,
    "torch/model/passes/unfuse_experts.py:UnfusedExperts._with_extra": _EACH,
    "torch/model/record_forward.py:_same_storage": _EACH,
    "torch/quantizer.py:_recorded": _COMPLEX,
    "torch/writers/comfyui/names.py:_row_name": _STEPS,
    "torch/writers/comfyui/solved.py:_tensor": _EACH,
    "torch/writers/gguf/format.py:GgufLayout._params_of": _EACH,
    "torch/writers/gguf/further_tokens.py:_have_places": _COMPLEX,
    "torch/writers/gguf/imatrix.py:_joined": _EACH,
    "torch/writers/gguf/import_file.py:_check_shape": _COMPLEX,
    "torch/writers/model_card.py:_is_plain": _EACH,
    "torch/writers/model_card.py:_reads_cache": _COMPLEX,
    "torch/writers/onnx/activations.py:_is_dynamic_quantize_linear": _STEPS,
    "torch/writers/onnx/activations.py:_is_quantize_linear": _STEPS,
    "torch/writers/onnx/weights.py:_is_linear": _STEPS,
}

FEWEST_LINES = 6

_WORDS = "|".join(DENIED)
_DENIED = re.compile(
    rf"(?<![a-z])(?!held[-_]out)(?:{_WORDS})(?![a-z])|(?!Held[-_]out)(?:{_WORDS.title()})(?![a-z])|(?<![A-Z])(?:{_WORDS.upper()})(?![A-Z])"
)
_HALF = re.compile(r'"""(?:(?:The same|As above|What|Whether)\b|As `).*')
"""A docstring that begins with another definition, or is half a sentence, which only the code finishes."""


def denied_words(text: str) -> list[tuple[int, str]]:
    """The lines of a text with the denied words in them: of names, whose parts are words, and of all else."""
    return [(n, word) for n, line in enumerate(text.splitlines(), 1) for word in _DENIED.findall(line)]


@cache
def _named() -> tuple[dict[str, Counter[Path]], dict[str, Counter[Path]]]:
    """Private name -> how often each file has it, and in how many definitions."""
    named: dict[str, Counter[Path]] = defaultdict(Counter)
    homes: dict[str, Counter[Path]] = defaultdict(Counter)
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"\b_[a-zA-Z]\w*", text):
            named[name][file] += 1
        for name in re.findall(r"^ *def (_[a-zA-Z]\w*)", text, re.MULTILINE):
            homes[name][file] += 1
    return named, homes


def called_once(files: Iterable[Path]) -> dict[str, str]:
    """Short private functions that nothing but one call names: "file:function" -> where the call stands.

    Those stay that a call could not be replaced by: generators, what is decorated, methods of which there are several,
    as those that a class of the family defines again, and what is handed on as a value.
    """
    named, homes = _named()
    found = {}
    for file in files:  # a definition, a call, and once in a text: the others are not parsed
        few = {
            name: [other for other in named[name] if other == file or other not in homes[name]]
            for name, count in homes.items()
            if count[file] == 1 and named[name][file] <= 3
        }
        few = {name: files for name, files in few.items() if sum(named[name][other] for other in files) <= 3}
        for owner, node in _functions(file) if few else ():
            if node.name not in few or not _is_short(node) or (owner and len(homes[node.name]) > 1):
                continue
            places = [(other, line) for other in few[node.name] for line in _uses(other)[node.name]]
            if len(places) == 1 and places[0][1]:
                place = f"line {places[0][1]} of {relative(places[0][0])}"
                found[f"{relative(file)}:{owner}{'.' if owner else ''}{node.name}"] = place
    return found


def _functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Class or nothing, and definition."""
    for node in parsed(file).body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))


def _is_short(node: ast.FunctionDef) -> bool:
    """Private, plain, and of few lines without its docstring."""
    plain = all(getattr(d, "id", "") in ("staticmethod", "classmethod") for d in node.decorator_list)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not plain or not body or any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node)):
        return False
    last = body[-1].end_lineno
    assert last
    return last - body[0].lineno < FEWEST_LINES - 1


@cache
def _uses(file: Path) -> dict[str, list[int]]:
    """Private name that a file reads -> each line where it is called; 0 where it is imported or passed as a value."""
    called: set[int] = set()
    lines: dict[str, list[int]] = defaultdict(list)
    for node in ast.walk(parsed(file)):  # a call before the name that it calls
        if isinstance(node, ast.Call):
            called.add(id(node.func))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                lines[alias.name].append(0)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            lines[name].append(node.lineno if id(node) in called else 0)
    return lines


def test_denied_words_are_in_no_name_and_no_text() -> None:
    texts = {relative(file): file.read_text(encoding="utf-8") for file in FILES}
    found = {file: [*denied_words(file), *denied_words(text)] for file, text in texts.items()}
    found = {
        file: [(n, word) for n, word in lines if word not in DOCUMENTED.get(file, ())] for file, lines in found.items()
    }
    assert not any(found.values()), {file: lines for file, lines in found.items() if lines}


def test_a_short_function_that_is_called_once_stands_where_it_is_called() -> None:
    found = called_once(FILES)
    new = {name: call for name, call in found.items() if name not in STAND_ALONE}
    assert not new, new
    stale = sorted(STAND_ALONE.keys() - found.keys())
    assert not stale, f"no exceptions any longer: {stale}"


def test_a_docstring_is_understood_by_itself() -> None:
    texts = {relative(file): file.read_text(encoding="utf-8") for file in FILES}
    found = {file: lines for file, text in texts.items() if (lines := _HALF.findall(text))}
    assert not found, found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("lent_tokens", 1),
        ("_is_held", 1),
        ("BesidesIt", 1),
        ("JUDGED = 3", 1),
        ("held-out data, held_out, Held-out", 0),
        ("shelved, twinkle, talent, beside", 0),
    ],
)
def test_words_are_found_in_names_too(text: str, count: int) -> None:
    assert len(denied_words(text)) == count
