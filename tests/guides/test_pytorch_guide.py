"""The code of the PyTorch guide, extracted and run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.zoo import tiny_opt

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
    assert "[QUARK-INFO]: Model quantization has been completed." in done.stdout


def test_step_5_freezes_and_says_that_onnx_export_is_to_come(workplace: Path) -> None:
    code = snippet() + step_5()
    assert "freezed_quantized_model = quantizer.freeze(quant_model)" in step_5()
    done = run(code, workplace)
    assert done.returncode != 0
    assert "NotSupportedError: export_onnx is not part of this version" in done.stderr
    frozen = code.replace(
        "exporter.export_onnx_model(quant_model, input_args)", "print(quant_model(input_args).logits.shape)"
    )
    done = run(frozen, workplace)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, " in done.stdout
