"""What the pages on tools, automatic search and readers print, restated with a small model, and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from quark.compat.onnx_tools.command_line import run_tool
from quark.onnx import Config, ModelQuantizer, QConfig, get_default_config
from tests.models.onnx_zoo import Reader, cnn, images, run

pytestmark = pytest.mark.slow

COMMANDS = """
convert_fp32_to_fp16 --input FLOAT32 --output OUT
convert_fp32_to_fp16 --input FLOAT32 --output OUT --save_as_external_data
convert_fp32_to_fp16 --input FLOAT32 --output OUT --keep_io_types
convert_fp32_to_bf16 --input FLOAT32 --output OUT --format with_cast
convert_fp32_to_bf16 --input FLOAT32 --output OUT --format customqdq
convert_fp32_to_bf16 --input FLOAT32 --output OUT --format simulate_bf16
convert_fp32_to_bf16 --input FLOAT32 --output OUT --format with_cast --save_as_external_data
convert_fp16_to_bf16 --input FLOAT16 --output OUT --format with_cast
convert_fp16_to_bf16 --input FLOAT16 --output OUT --format simulate_bf16 --save_as_external_data
convert_fp16_to_fp32 --input FLOAT16 --output OUT
convert_fp16_to_fp32 --input FLOAT16 --output OUT --save_as_external_data
convert_fp32_to_bfp16 --input FLOAT32 --output OUT
convert_fp32_to_bfp16 --input FLOAT32 --output OUT --save_as_external_data
convert_fp16_to_bfp16 --input FLOAT16 --output OUT
convert_fp16_to_bfp16 --input FLOAT16 --output OUT --save_as_external_data
convert_custom_ops --input_model INT8 --output_model OUT
convert_custom_ops --input_model INT8 --output_model OUT --reverse_conversion True --external_data True
convert_nchw_to_nhwc --input FLOAT32 --output OUT
random_quantize --input_model_path FLOAT32 --quantized_model_path OUT
convert_a8w8_npu_to_a8w8_cpu --input XINT8 --output OUT
convert_u16u8_to_u8u8 --input INT8 --output OUT
replace_inf_weights --input_model FLOAT32 --output_model OUT --replace_inf_value 10000.0
fix_shapes --input_model_path FLOAT32 --output_model_path OUT
fix_shapes --input_model_path INT8 --output_model_path OUT
convert_bias_int32_to_int16 --input_model_path INT8 --output_model_path OUT
convert_opset_version --input FLOAT32 --target_opset 20 --output OUT
convert_shared_initializer_to_unique --input FLOAT32 --op_types Conv,Gemm --output OUT
remove_initializer_from_input --input FLOAT32 --output OUT
remove_qdq --input_model INT8 --output_model OUT
""".strip().splitlines()


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, str]:
    """The models that the commands name, as paths."""
    folder = tmp_path_factory.mktemp("models")
    paths = {name: str(folder / f"{name}.onnx") for name in ("FLOAT32", "FLOAT16", "INT8", "XINT8")}
    onnx.save(cnn(), paths["FLOAT32"])
    run_tool("convert_fp32_to_fp16", [paths["FLOAT32"], paths["FLOAT16"]])
    for name, config in (("INT8", "S8S8_AAWS"), ("XINT8", "XINT8")):
        quantizer = ModelQuantizer(QConfig.get_default_config(config))
        quantizer.quantize_model(paths["FLOAT32"], paths[name], Reader(images()))
    return paths


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_writes_a_model_that_computes_the_same(command: str, models: dict[str, str], tmp_path: Path) -> None:
    tool, *words = command.split()
    output = str(tmp_path / "out.onnx")
    run_tool(tool, [models.get(word, output if word == "OUT" else word) for word in words])
    written = onnx.load(output)
    (feed,) = images(1)
    expected = run(cnn(), feed)
    (entry,) = [value for value in written.graph.input if value.name == "x"]
    if entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16:
        feed = {"x": feed["x"].astype(np.float16)}
    if "nhwc" in tool:
        feed = {"x": feed["x"].transpose(0, 2, 3, 1)}
    if tool == "random_quantize":
        feed = {"x": feed["x"][:1]}  # its ranges are of noise: only the shape of the result is meant
        assert run(output, feed).shape == (1, 10)
        return
    # Of 8 bits through seven layers about 3 % are left out; formats with more bits are far below.
    assert abs(run(output, feed).astype(np.float32) - expected).max() < 0.1 * abs(expected).max()
    assert ("external_data" in command) <= (tmp_path / "out.onnx.data").exists() or tool == "convert_custom_ops"


SNIPPETS: dict[str, str] = {
    "quick start": """
import copy
from quark.onnx import AutoSearchPro, get_auto_search_config
quant_config = copy.deepcopy(get_auto_search_config("XINT8_SEARCH"))
quant_config["model_input"] = model
quant_config["calib_data_reader"] = reader
for name in ("algorithms", "adaround_params", "adaquant_params", "cle_algo", "cle_params"):
    del quant_config["search_space"][name]
best_params = AutoSearchPro(quant_config).run()
assert best_params["activation"] == "XInt8Spec"
""",
    "own space": """
from quark.onnx import AutoSearchPro
base_config = {
    "search_space": {
        "activation": ["Int8Spec"],
        "activation_params": {"symmetric": [True, False], "calibration_method": ["MinMax", "Percentile",
                              "LayerwisePercentile"], "only_if": "activation"},
        "weight": ["Int8Spec"],
        "weight_params": {"symmetric": [True], "calibration_method": ["MinMax"], "only_if": "weight"},
        "specific_layer_config": [None], "layer_type_config": [None], "exclude": [None],
        "use_external_data_format": [False], "OptimizeModel": [False],
    },
    "n_trials": 3, "n_jobs": 1, "output_dir": "./output", "temp_dir": "./temp_dir", "search_algo": "TPE",
    "search_evaluator": None, "direction": "minimize", "base_framework": "onnx", "model_input": model,
    "calib_data_reader": reader, "eval_data_reader": None, "load_study_if_exists": False, "two_stage_search": False,
}
best_params = AutoSearchPro(base_config).run()
assert best_params["weight_params"] == {"symmetric": True, "calibration_method": "MinMax"}
""",
    "auto search of the older configs": """
from onnxruntime.quantization.calibrate import CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantType
from quark.onnx import PowerOfTwoMethod
from quark.onnx.auto_search import AutoSearch, AutoSearchConfig
auto_search_config = AutoSearchConfig()
auto_search_config.search_space = {
    "calibrate_method": [PowerOfTwoMethod.NonOverflow, CalibrationMethod.MinMax],
    "activation_type": [QuantType.QInt8], "weight_type": [QuantType.QInt8], "include_fast_ft": [False],
    "extra_options": {"ActivationSymmetric": [True], "CalibMovingAverage": [False]},
}
auto_search_config.search_stop_condition = {"find_n_candidates": -1, "find_best_candidate": -1,
                                            "iteration_limit": 1000, "time_limit": 3600}
auto_search_config.search_evaluator = None
instance = AutoSearch(model, config, auto_search_config, calibration_data_reader=reader)
candidates = instance.search_model()
assert [candidate["config_index"] for candidate in candidates] == [0, 1]
""",
    "auto search as a module": """
from quark.onnx import ExtendedQuantFormat, ExtendedQuantType, auto_search
class AutoSearchConfig_Default:
    search_space = {"include_cle": [False], "extra_options": {"ActivationSymmetric": [True, False]}}
    search_space_bf16 = {"activation_type": [ExtendedQuantType.QBFloat16], "weight_type": [ExtendedQuantType.QBFloat16],
                         "quant_format": [ExtendedQuantFormat.QDQ], "include_cle": [False]}
    search_metric = "L2"
    search_algo = "grid_search"
    search_evaluator = None
    search_metric_tolerance = 0.60001
    search_stop_condition = {"find_n_candidates": 10, "iteration_limit": 10000, "time_limit": 1000000.0}
auto_search_config = AutoSearchConfig_Default()
ins = auto_search.AutoSearch(config=config, auto_search_config=auto_search_config, model_input=model,
                             calibration_data_reader=reader)
ins.all_configs = ins.build_all_configs(auto_search_config.search_space) + ins.build_all_configs(
    auto_search_config.search_space_bf16)
assert len(ins.search_model()) == 3
""",
    "search addresses": """
from quark.onnx.quantization.auto_search import AutoSearch, AutoSearchPro, SearchSpace, generate_all_configs
from quark.onnx.quantization.auto_search.auto_search_v1 import AutoSearchConfig
assert len(generate_all_configs({"a": [1, 2], "b": {"c": [3, 4], "only_if": {"a": 1}}})) == 3
""",
    "readers": """
from quark.onnx.calibration import CachedDataReader, LayerWiseMethod, PathDataReader, PowerOfTwoMethod, RandomDataReader
cached = CachedDataReader(reader)
cached.set_range(1, 3)
assert len(cached) == 4 and len(list(iter(cached.get_next, None))) == 2
""",
    "calibration data path": """
import os
import numpy as np
from quark.onnx import ModelQuantizer
os.makedirs("calibration_data")
for index in range(3):
    np.save(f"calibration_data/calib_{index + 1:06d}.npy", np.random.default_rng(index).normal(
        size=(1, 3, 16, 16)).astype(np.float32))
ModelQuantizer(config).quantize_model(model, "out.onnx", calibration_data_path="calibration_data/")
assert os.path.exists("out.onnx")
""",
    "dump": """
import os
import quark.onnx
quark.onnx.dump_model("float.onnx", dump_data_reader=None, random_data_reader_input_shape={"x": [1, 3, 16, 16]},
                      dump_float=True, output_dir="./dump_results")
assert os.path.exists("dump_results/y_float.bin")
""",
    "shared initializers": """
import onnx
from quark.onnx.tools import convert_shared_initializer_to_unique
new_onnx_model = convert_shared_initializer_to_unique.convert(onnx.load(model), ["Conv", "Gemm"])
assert len(new_onnx_model.graph.node) == len(onnx.load(model).graph.node)
""",
    "older paths": """
from quark.onnx.quant_utils import ExtendedQuantFormat, ExtendedQuantType, PowerOfTwoMethod
from quark.onnx.quantization.quant_utils import VitisQuantFormat, VitisQuantType
from quark.onnx.quantization.config.custom_config import DEFAULT_ADAROUND_PARAMS, U8S8_AAWS_CONFIG
assert DEFAULT_ADAROUND_PARAMS["OptimAlgorithm"] == "adaround"
""",
}


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_snippet_runs(title: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(cnn(), "float.onnx")
    names = {
        "model": "float.onnx",
        "reader": Reader(images()),
        "config": Config(global_quant_config=get_default_config("S8S8_AAWS")),
    }
    exec(SNIPPETS[title], names)
