"""Tests this checkout, on one thread, with hypothesis repeatable."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

# The checkout that the tests belong to, even where another one is installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import quark  # noqa: F401 - before onnxruntime, whose telemetry it switches off
from quark.base.log import logger
from quark.jobs.folders.compared import job_verdict

if not hasattr(os, "mkfifo"):  # Windows: a test that needs a pipe among its files ends there
    os.mkfifo = lambda *_: pytest.skip("this system has no pipes with names")

job_verdict.BY_DEFAULT = False  # a second or two of each job; those that are about it ask for a verdict

settings.register_profile(
    "quark", derandomize=True, deadline=None, max_examples=60, database=None,
    suppress_health_check=[HealthCheck.too_slow],  # which is of the machine, where other work runs beside
)  # fmt: skip
settings.load_profile("quark")


OVER_REGISTRIES = {
    "commands/test_model_kinds.py::test_a_folder_becomes_one_that_its_class_loads": 6,
    "contracts/test_attention_masks.py": 20,
    "contracts/test_device_maps.py": 10,
    "contracts/test_device_maps.py::test_architectures": 16,
    "contracts/test_device_maps.py::test_every_algorithm_where_the_model_lies": 20,
    "contracts/test_device_maps.py::test_every_scheme": 40,
    "contracts/test_diffusers.py": 60,
    "contracts/test_doors.py": 10,
    "contracts/test_doors_gguf.py::test_the_bytes_of_every_door": 4,
    "contracts/test_export_onnx.py": 4,
    "contracts/test_parts.py": 4,
    "contracts/test_parts.py::test_a_command_writes_what_it_writes_at_once": 160,
    "contracts/test_surroundings.py": 4,
    "contracts/test_exported_dtypes.py": 4,
    "contracts/test_float_layers.py": 30,
    "contracts/test_float_tensors.py": 40,
    "contracts/test_flows.py::test_flows_agree": 7,
    "contracts/test_flows.py::test_flows_agree_on_data": 7,
    "contracts/test_foreign_folders.py": 4,
    "contracts/test_foreign_folders.py::test_every_command_takes_such_a_folder": 6,
    "contracts/test_fused_layers.py": 30,
    "contracts/test_gpu.py": 30,
    "contracts/test_gpu.py::test_every_scheme_under_every_algorithm": 97,
    "contracts/test_idle_experts.py": 20,
    "contracts/test_kv_cache.py": 10,
    "contracts/test_loaded_life.py": 40,
    "contracts/test_mixtures.py": 12,
    "contracts/test_observers.py": 10,
    "contracts/test_on_load.py": 40,
    "contracts/test_options.py": 5,
    "contracts/test_padding.py": 10,
    "contracts/test_presets.py": 4,
    "contracts/test_presets.py::test_every_model_runs_near_float": 16,
    "contracts/test_reader_classes.py": 59,  # a prime, by which no case of minutes is taken
    "contracts/test_sources.py": 10,
    "contracts/test_sources.py::test_quantized_sources": 20,
    "core/test_block_solvers.py": 10,
    "core/test_group_kernels.py": 10,
    "core/test_power_of_two.py": 4,
    "jobs/test_best_effort.py::test_every_family_is_quantized_by_the_best": 8,
    "jobs/test_doors.py": 20,
    "onnx/algorithms/test_bias_correction.py::test_it_never_hurts": 5,
    "onnx/calibration/test_padding.py::test_no_configuration_sees_what_stands_at_masked_positions": 5,
    "onnx/operators/test_custom_ops.py::test_blocks_have_the_bits_of_core_as_function_and_as_kernel": 4,
    "onnx/qdq/test_extended.py::test_presets_run_in_stock_sessions_and_with_the_library": 4,
    "onnx/qdq/test_rewritten_nodes.py::test_attributes_keep_their_meaning_in_every_configuration": 10,
    "onnx/search/lost_outputs/test_verdict.py::test_the_verdict_on_detectors_is_that_of_their_decisions": 8,
    "onnx/test_odd_models.py::test_a_right_result": 6,
    "torch/algorithms/test_algorithms.py::test_solved_weights_lie_on_the_grid": 4,
    "torch/algorithms/test_folds.py::test_folds_of_each_architecture_keep_its_outputs": 4,
    "torch/algorithms/test_rows_in_parts.py::test_parts_are_those_of_the_whole": 6,
    "torch/algorithms/test_smooth.py::test_the_float_model_computes_what_it_did": 4,
    "torch/flows/on_load/test_of_diffusers.py::test_it_is_the_network_of_the_quantized_folder": 10,
    "torch/flows/test_stream.py::test_a_killed_run_goes_on": 3,
    "torch/flows/test_stream.py::test_an_encoder_and_its_decoder_are_streamed": 3,
    "torch/flows/test_stream.py::test_bytes_are_those_of_the_model_in_memory": 3,
    "torch/flows/test_stream_cache.py::test_a_killed_run_goes_on_beside_algorithms": 8,
    "torch/flows/test_stream_cache.py::test_beside_algorithms": 8,
    "torch/flows/test_stream_cache.py::test_bytes_are_those_of_the_model_in_memory": 10,
    "torch/flows/test_stream_cache.py::test_other_families": 10,
    "torch/formats/test_compressed_tensors.py::test_transformers_decodes_the_weights_of_every_scheme": 4,
    "torch/formats/test_formats.py::test_the_importer_gives_equal_logits": 10,
    "torch/formats/test_formats.py::test_transformers_loads_every_scheme_with_equal_logits": 10,
    "torch/formats/test_gptq.py::test_every_kind_of_folder": 4,
    "torch/model/test_experts.py::test_a_checkpoint_loads_through_transformers_and_the_importer": 3,
    "torch/writers/test_gguf.py::test_a_file_is_that_of_which_llama_cpp_computed_the_logits": 10,
    "torch/writers/test_gguf.py::test_a_mix_is_read_back_to_the_bit": 3,
    "torch/writers/test_gguf.py::test_a_scheme_is_read_back_or_refused": 4,
    "torch/writers/test_gguf.py::test_transformers_reads_equal_logits": 10,
    "torch/writers/test_gguf_folder.py::test_the_folder_of_a_file_is_that_of_which_the_file_was_made": 10,
}
"""Files, and single tests, over products of registries, hours in all: `make test-all` runs one of so many of their slow
cases, always the same, and `make contracts` all of them."""
EVERYDAY = (
    "test_demo.py::test_digits_keep_their_accuracy_in_every_scheme",
    "test_docs.py::test_snippets_and_commands_run_as_printed[docs/guide/recipes.md]",
    "test_one_call.py::test_a_family_is_the_scheme_of_the_goal",
    "contracts/test_foreign_folders.py::test_every_door_says_the_same_of_what_is_not_read[floats as gptq]",
    "contracts/test_foreign_folders.py::test_every_door_writes_what_the_values_give[mlx-llama]",
    "jobs/test_gguf_sources.py::test_quantize_gives_what_it_gives_of_the_folder[options1]",
    "contracts/test_on_load.py::test_it_is_the_model_of_the_quantized_folder[qwen3_moe int4_wo_32]",
    "jobs/test_pipelines.py::test_diffusers_runs_a_pipeline_of_which_some_components_are_quantized",
    "kill/test_kill.py::test_kills_leave_nothing_behind",
    "torch/algorithms/test_output_scores.py::test_held_out_divergence_falls[qronos int3]",
    "torch/calibration/test_distributed.py::test_a_rank_that_ends_is_named_by_the_others_and_nothing_stays[killed-0]",
    "torch/calibration/test_rendezvous.py::test_a_partner_that_does_not_come_is_said_and_named[waits]",
    "torch/flows/on_load/test_of_diffusers.py::test_it_is_the_network_of_the_quantized_folder[int8_wo]",
    "torch/flows/test_stream.py::test_a_killed_run_goes_on[2-True-static activations]",
    "torch/writers/test_gguf_folder.py::test_a_file_that_contradicts_itself_is_refused[a million heads]",
    "torch/writers/test_gguf_folder.py::test_a_model_comes_back_to_the_bit[gemma2]",
    "torch/test_vision_models.py::test_a_vision_model_is_quantized_saved_loaded_and_exported[int8]",
)
"""Slow tests that `make test` runs, each for its kind: published numbers, processes, kills, what pages print."""


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """A job that ends leaves the level at which is logged as it was, whatever it muted and in how many threads."""
    before = logger.level
    yield
    after = logger.level
    logger.setLevel(before)
    assert after == before, f"The log has level {after} and had {before}."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-contract", action="store_true", help="all slow tests of the contracts over registries")


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays: looking for garbage in it takes a quarter of that time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most of the slow tests of the contracts over registries, unless all are asked for.

    A test that is named on the command line runs, too.
    """
    for item in items:
        if item.nodeid.removeprefix("tests/") in EVERYDAY:
            item.add_marker("everyday")
    if config.getoption("--every-contract") or any("::" in argument for argument in config.args):
        return
    left_out = {item.nodeid for item in items if _is_left_out(item)}
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in by_function.values():
        if all(item.nodeid in left_out for item in cases):
            left_out.discard(cases[0].nodeid)  # each function keeps one, whatever the numbers of its names are
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def _is_left_out(item: pytest.Item) -> bool:
    file = item.nodeid.removeprefix("tests/").split("::")[0]
    of_so_many = OVER_REGISTRIES.get(f"{file}::{getattr(item, 'originalname', '')}", OVER_REGISTRIES.get(file, 1))
    sampled = "slow" in item.keywords and "everyday" not in item.keywords
    return sampled and zlib.crc32(item.nodeid.encode()) % of_so_many != 0
