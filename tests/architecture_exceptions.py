"""What test_architecture.py lets pass, each with its reason."""

from __future__ import annotations

LISTS = {
    "commands": "a command each",
    "core/observers": "an observer each",
    "onnx/passes": "a pass each",
}
FULL_FOLDERS = {
    "core/solvers": "a solver each, and what several of them call",
    ".": "the rooms, and what starts the program",
    "core": "a concept of quantizing each; two of them are the block types of GGUF, their rows and their search",
    "torch": "the rooms of the flowand its files",
    "onnx": "the files that are the flow, beside the rooms that it leads through",
}

# Names that are documented for both flows, where each has its own meaning: `quark.torch.X` and `quark.onnx.X`.
IN_BOTH_FLOWS = (
    "AlgoConfig", "GPTQConfig", "ModelQuantizer", "QConfig", "QLayerConfig", "QTensorConfig", "SmoothQuantConfig",
    "BFP16Spec", "Float16Spec", "MX6Spec", "MX9Spec",
)  # fmt: skip
SEVERAL_MEANINGS = {
    "Dtype": "the documented enum of the torch flow's configs, and the element type of the core",
    "PlaceholderObserver": "the documented class of the torch flow's configs, and the observer that it stands for",
    "ScaleType": "the documented enum of the ONNX flow's configs, and the type of a scale in the core",
}

# Files whose name says something else than what they hold.
NAMED_OTHERWISE = {
    "cli.py": "the entry point of a program is looked for under this name",
}

# Habits that a file breaks where clarity costs more, with the reason.
LONG_FILES: dict[str, str] = {}
COMPLEX_FUNCTIONS: dict[str, str] = {
    "onnx/evaluation/compare_models.py:compare_models": "until",
    "onnx/evaluation/compare_models.py:damaged_layers": "until",
    "onnx/evaluation/compare_models.py:match_layers": "until",
    "onnx/search/lost_outputs/advice.py:_around": "until",
    "onnx/search/lost_outputs/damage.py:damage": "until",
    "onnx/search/lost_outputs/verdict.py:judge": "until",
    "onnx/evaluation/ort_fusion_nodes.py:QuantizedNode.bias": "until",
    "onnx/search/recovery/search.py:recover": "until",
    "torch/checkpoint/quantization_config.py:folder_of": "until",
    "torch/checkpoint/shards.py:entries": "until",
    "torch/checkpoint/sources/carried.py:carried_layers": "until",
    "torch/checkpoint/sources/carried.py:plan_carried": "until",
    "torch/flows/check_plan.py:lost_experts": "until",
    "torch/flows/float_layers.py:left_in_float": "until",
    "torch/formats/compressed_tensors/args.py:read_args": "until",
    "torch/formats/compressed_tensors/args.py:refuse_args": "until",
    "torch/formats/compressed_tensors/experts.py:group_targets": "until",
    "torch/formats/compressed_tensors/transforms.py:read_transforms": "until",
    "torch/formats/readers.py:check_readers": "until",
    "torch/model/calibration_data/unpadding.py:_attended": "until",
    "torch/model/calibration_data/unpadding.py:_rows": "until",
    "torch/model/calibration_data/unpadding.py:_sides": "until",
}
"""Of these each is to be mended; none is to be added."""
