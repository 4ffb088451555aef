"""The programs whose folders hold weights in tensors of other names, by their `quant_method`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.torch.checkpoint.sources.encoded import EncodedWeight, Files
from quark.torch.checkpoint.sources.encodings import bitsandbytes, mlx, torchao

Encoding = Callable[[Files, dict[str, Any]], list[EncodedWeight]]
"""The files of a folder and its `quantization_config` -> its encoded weights.

Raises FormatError for tensors that do not belong together, and NotSupportedError for codes that are not read.
"""
ENCODINGS: dict[str, Encoding] = {
    "bitsandbytes": bitsandbytes.encoded_weights,
    "torchao": torchao.encoded_weights,
    "mlx": mlx.encoded_weights,
}
