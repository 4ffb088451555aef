"""What test_architecture.py lets pass, each with its reason."""

from __future__ import annotations

LISTS = {
    "commands": "a command each",
    "core/observers": "an observer each",
    "onnx/passes": "a pass each",
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
