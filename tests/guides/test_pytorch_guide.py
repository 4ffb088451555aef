"""The code of the PyTorch guide, extracted and run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.models.torch_zoo import tiny_opt

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parent / "data" / "pytorch_guide.rst"
MARKER = "# # 5. (Optional) Export onnx"


def snippet() -> str:
    """The one code block of the guide, dedented."""
    text = GUIDE.read_text().split(".. code-block:: python", 1)[1].split("If the code runs successfully", 1)[0]
    return textwrap.dedent(text)


def step_5() -> str:
    """The commented export step, uncommented, on the CPU."""
    lines = snippet().split(MARKER, 1)[1].splitlines()
    code = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines if not line.startswith("# #"))
    return code.replace("'cuda'", "'cpu'")


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "guide.py").write_text(code)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "guide.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    tiny_opt(folder / "facebook" / "opt-125m")
    return folder


def test_steps_1_to_4_run_as_printed(workplace: Path) -> None:
    done = run(snippet(), workplace)
    assert done.returncode == 0, done.stderr
    assert "[QUARK-INFO]: Model quantization has been completed." in done.stderr


def test_step_5_exports_onnx_that_computes_the_same(workplace: Path) -> None:
    assert "exporter.export_onnx_model(quant_model, input_args)" in step_5()
    check = """
import numpy as np, onnx, onnxruntime, torch
file = 'export_path/quark_model.onnx'
kinds = {i.name: i.data_type for i in onnx.load(file).graph.initializer}
assert sum(kind == onnx.TensorProto.INT8 for name, kind in kinds.items() if name.endswith('_quantized')) > 12
with torch.no_grad():
    wanted = quant_model(input_args).logits.numpy()
# By default ONNX Runtime rounds the other operand of such products to 8 bits.
for level, tolerance in ('4', 2e-2), ('1', 1e-5):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry('session.qdq_matmulnbits_accuracy_level', level)
    found = onnxruntime.InferenceSession(file, options).run(None, {'input_ids': input_args.numpy()})[0]
    assert np.abs(found - wanted).max() < tolerance * np.abs(wanted).max()
"""
    done = run(snippet() + step_5() + check, workplace)
    assert done.returncode == 0, done.stderr
    assert "[QUARK-INFO]: Exported to export_path" in done.stderr
