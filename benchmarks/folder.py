"""Where the ONNX benchmark models lie; without imports, so that the peer's interpreter can ask too."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def model_folder() -> Path:
    """`QUARK_BENCHMARK_MODELS`, else a folder beside other temporary files that later runs find again."""
    return Path(os.environ.get("QUARK_BENCHMARK_MODELS") or Path(tempfile.gettempdir()) / "quark_benchmark_models")
