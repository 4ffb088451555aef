"""onnx-ptq, onnx-autosearch and onnx-validate."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from quark.base.log import logger
from quark.errors import ConfigError, NotSupportedError

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
NO_LOADER = "images are read one by one, by one thread"


def _say_unused(args: argparse.Namespace, reasons: Mapping[str, str]) -> None:
    """Log a line for each argument that was given and changes nothing here, and why."""
    defaults = {"device": "cpu", "batch_size": 1, "workers": 1, "num_calib_data": 1000, "no_cuda": False}
    for name, reason in reasons.items():
        if getattr(args, name) not in (None, "", False, defaults.get(name)):
            logger.info("--%s changes nothing here: %s.", name, reason)


def declare_ptq(add: Callable[..., Any]) -> None:
    """Declare the arguments of onnx-ptq."""
    add("--input_model_path", required=True)
    add("--output_model_path", default="quantized.onnx")
    add("--config", default="XINT8", help="name of a configuration: quark schemes MODEL.onnx")
    add("--calib_data_path", "--calibration_dataset_path", help="images in a folder for each class, or arrays")
    add("--calib_image_dim", type=int, default=224, help="side of the square that images are cut to")
    add("--calib_dataset_name")
    add("--calib_method", default="", help="minmax, percentile, percentile+99.99 or layerwise_percentile")
    add("--exclude_nodes", default="", help="names, with ; between them")
    add("--exclude_subgraphs", default="", help="[first nodes], [last nodes]; [..], [..]")
    for name in ("--adaquant", "--adaround", "--use_moving_average", "--save_as_external_data", "--include_sq"):
        add(name, action="store_true")
    for name in ("--use_gptq", "--include_rotation", "--use_random_had", "--use_crypto"):
        add(name, action="store_true")
    add("--cle", "--include_cle", action="store_true")
    add("--learning_rate", type=float, default=0.1)
    add("--num_iters", type=int, default=1000)
    add("--sq_alpha", type=float, default=0.5)
    add("--hidden_size", type=int, default=4096)
    add("--r_config_path", default="")
    _declare_unused(add)
    add("--num_head", type=int)
    add("--auto_search_config")


def _declare_unused(add: Callable[..., Any]) -> None:
    add("--model_name")
    add("--num_calib_data", type=int, default=1000)
    add("--batch_size", type=int, default=1)
    add("--workers", type=int, default=1)
    add("--device", default="cpu", help="cpu, rocm or cuda")


def onnx_ptq(args: argparse.Namespace) -> None:
    """Quantize an ONNX file.

    Raises:
        ConfigError: An argument is none that is possible.
        NotSupportedError: A named dataset is asked for.
    """
    from quark.onnx import Config, ModelQuantizer

    if args.calib_dataset_name is not None:
        raise NotSupportedError(
            "--calib_dataset_name: datasets are not fetched. Possible: --calib_data_path with .npz files of the inputs."
        )
    _say_unused(
        args,
        {
            "model_name": "images are cut to --calib_image_dim, with the mean and deviation of ImageNet",
            "num_calib_data": "all files of the folder are read", "batch_size": NO_LOADER, "workers": NO_LOADER,
            "device": "calibration runs on the CPU", "num_head": "it is of --calib_dataset_name",
            "auto_search_config": "onnx-autosearch has it",
        },
    )  # fmt: skip
    model: Any = args.input_model_path
    if args.use_crypto:
        import onnx

        model = onnx.load(model)
    data = None
    if args.calib_data_path is not None:
        data = (feed for _, feed in _labelled(args.input_model_path, args.calib_data_path, args.calib_image_dim))
    ModelQuantizer(Config(_ptq_config(args))).quantize_model(model, args.output_model_path, data)


def _ptq_config(args: argparse.Namespace) -> Any:
    """The configuration of the name, with what the arguments say, and what the documented command always sets."""
    from quark.onnx.config.presets import get_default_config

    config = get_default_config(args.config)
    options = config.extra_options
    config.crypto_mode, config.use_external_data_format = args.use_crypto, args.save_as_external_data
    config.optimize_model, config.include_cle = False, args.cle and not args.include_rotation
    options |= {"RemoveInputInit": False, "SimplifyModel": False, "ActivationSymmetric": True, "MatMulConstBOnly": True}
    options |= {
        "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"], "CalibMovingAverage": args.use_moving_average,
    }  # fmt: skip
    if args.adaround or args.adaquant:
        config.include_fast_ft = True
        options["FastFinetune"] = {
            "DataSize": 1000, "FixedSeed": 1705472343, "BatchSize": 2, "EarlyStop": True,
            "NumIterations": args.num_iters, "LearningRate": args.learning_rate,
            "OptimAlgorithm": "adaquant" if args.adaquant else "adaround", "OptimDevice": "cpu", "InferDevice": "cpu",
        }  # fmt: skip
    config.nodes_to_exclude = [name.strip() for name in args.exclude_nodes.split(";") if name.strip()]
    config.subgraphs_to_exclude = _subgraphs(args.exclude_subgraphs)
    config.include_sq, config.include_rotation = args.include_sq, args.include_rotation
    if args.include_sq:
        options["SmoothAlpha"] = args.sq_alpha
    if args.include_rotation:
        options |= {"RMatrixDim": args.hidden_size, "RConfigPath": args.r_config_path}
        options["UseRandomHad"] = args.use_random_had
    if args.use_gptq:
        options |= {"UseGPTQ": True, "GPTQParams": {"MSE": False, "GroupSize": 128, "PerChannel": True}}
    if args.config == "MATMUL_NBITS":
        options["MatMulNBitsParams"] |= {"AccuracyLevel": 0, "Algorithm": "GPTQ"}
    _set_calibration(config, args.calib_method)
    return config


def _set_calibration(config: Any, method: str) -> None:
    from quark.onnx.config.enums import CalibrationMethod, LayerWiseMethod

    methods = {
        "minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile,
        "layerwise_percentile": LayerWiseMethod.LayerWisePercentile,
    }  # fmt: skip
    name, _, share = method.partition("+")
    if method and (name not in methods or (share and name != "percentile")):
        raise ConfigError(f"--calib_method {method!r}. Possible: {', '.join(methods)}, percentile+99.99.")
    if method:
        config.calibrate_method = methods[name]
    if share:
        try:
            config.extra_options["Percentile"] = float(share)
        except ValueError:
            raise ConfigError(f"--calib_method {method!r}: {share!r} is no number.") from None


def _subgraphs(text: str) -> list[tuple[list[str], list[str]]]:
    """Pairs of lists of names, "[a, b], [c]; [d], [e]"."""
    found = []
    for part in filter(str.strip, text.split(";")):
        ends = [[name.strip() for name in names.split(",")] for names in re.findall(r"\[(.*?)\]", part)]
        if len(ends) != 2:
            raise ConfigError(f"--exclude_subgraphs {part.strip()!r}: expected [first nodes], [last nodes].")
        found.append((ends[0], ends[1]))
    return found


def _labelled(model: str, folder: str, side: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The samples of a folder, each with the position of its subfolder, which is its class; -1 without subfolders."""
    from quark.onnx.calibration.data.inputs import model_inputs
    from quark.onnx.calibration.data.path_reader import PathDataReader

    shape = next(iter(model_inputs(model).values())).shape or ()
    is_open = len(shape) == 4 and not all(isinstance(size, int) for size in shape[2:])
    resize = f"crop:{side}x{side}" if is_open else "crop"
    arrays = any(path.suffix in (".npy", ".npz") for path in (Path(folder), *Path(folder).rglob("*")))
    look: dict[str, Any] = {**IMAGENET, "resize": resize} if len(shape) == 4 and not arrays else {}
    classes = sorted(entry for entry in Path(folder).iterdir() if entry.is_dir()) if Path(folder).is_dir() else []

    def of(label: int, path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((label, feed) for feed in PathDataReader(model, path, **look))

    return chain.from_iterable(of(label, path) for label, path in enumerate(classes)) if classes else of(-1, folder)


def declare_search(add: Callable[..., Any]) -> None:
    """Declare the arguments of onnx-autosearch."""
    add("--input_model_path", required=True)
    add("--output_model_path", default="", help="where the best model goes; the others lie beside it")
    add("--calibration_dataset_path", required=True, help="a folder or a file of arrays")
    add("--config", default="S8S8_AAWS_ADAROUND")
    add("--auto_search_config", default="default_auto_search")
    _declare_unused(add)


def onnx_autosearch(args: argparse.Namespace) -> None:
    """Quantize an ONNX file by several configurations, and copy the best one. Raises ConfigError for other spaces."""
    from quark.compat.auto_search.auto_search import AutoSearch
    from quark.onnx import Config
    from quark.onnx.config.enums import CalibrationMethod, QuantType
    from quark.onnx.config.presets import get_default_config

    unused = {"model_name": "it names nothing", "num_calib_data": "the first ten samples are read"}
    _say_unused(args, {**unused, "batch_size": NO_LOADER, "workers": NO_LOADER, "device": "it runs on the CPU"})
    if args.auto_search_config != "default_auto_search":
        raise ConfigError(f"--auto_search_config {args.auto_search_config!r}. Possible: default_auto_search.")
    tuning = {"DataSize": [5], "NumIterations": [10, 50], "OptimAlgorithm": ["adaround"], "LearningRate": [0.1, 0.01]}
    moving = {"CalibMovingAverage": [True], "CalibMovingAverageConstant": [0.01]}
    space = {
        "calibrate_method": [CalibrationMethod.Entropy], "activation_type": [QuantType.QInt8],
        "weight_type": [QuantType.QInt8], "include_cle": [False], "include_fast_ft": [True],
        "extra_options": {**moving, "FastFinetune": tuning},
    }  # fmt: skip
    folder = Path(args.output_model_path).parent
    search = argparse.Namespace(
        search_space=space, search_metric_tolerance=1.0, search_output_dir=str(folder),
        search_log_path=str(folder / "auto_search.log"),
        search_stop_condition={"find_n_candidates": 2, "iteration_limit": 10000, "time_limit": 1e6},
    )  # fmt: skip
    config = get_default_config(args.config)
    config.calibrate_method = CalibrationMethod.MinMax
    config.extra_options["CalibDataSize"] = 10
    data = args.calibration_dataset_path
    found = AutoSearch(args.input_model_path, Config(config), search, calibration_data_path=data)
    found.search_model()
    if args.output_model_path and found.candidates:
        best = min(found.candidates, key=lambda candidate: candidate["difference"])
        shutil.copyfile(best["model_path"], args.output_model_path)


def declare_validate(add: Callable[..., Any]) -> None:
    """Declare the arguments of onnx-validate."""
    add("--val_data", help="folder with a folder of images for each class, in the order of the classes")
    add("--model_path", required=True)
    add("--model_name")
    add("--block_size", type=int)
    add("--per_gpu_eval_batch_size", type=int)
    add("--no_cuda", action="store_true")


def onnx_validate(args: argparse.Namespace) -> None:
    """Print how often an image classifier is right.

    Raises:
        NotSupportedError: It is a folder, or there are no images.
        ConfigError: The images are in no folders.
    """
    import numpy as np
    import onnxruntime

    if args.val_data is None or Path(args.model_path).is_dir():
        raise NotSupportedError(
            "onnx-validate measures a file of an image classifier, with --val_data. Possible for others: "
            "quark evaluate FLOAT QUANTIZED --data DATA."
        )
    reason = "images are read one by one, on the CPU, cut to 224 pixels"
    _say_unused(args, dict.fromkeys(("model_name", "block_size", "per_gpu_eval_batch_size"), reason))
    session = onnxruntime.InferenceSession(args.model_path, providers=["CPUExecutionProvider"])
    hits = []
    for label, feed in _labelled(args.model_path, args.val_data, 224):
        if label < 0:
            raise ConfigError(f"--val_data {args.val_data} has no folder for each class.")
        best = np.argsort(-np.asarray(session.run(None, feed)[0]), axis=-1).reshape(-1)[:5]
        hits.append((best[0] == label, label in best))
    top1, top5 = 100 * np.mean(hits, axis=0)
    sys.stdout.write(f" * Prec@1 {top1:.3f} ({100 - top1:.3f}) Prec@5 {top5:.3f} ({100 - top5:.3f})\n")
