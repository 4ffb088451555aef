"""Records how bitsandbytes, torchao and MLX store a small weight, and the values that they read there.

`python -m tests.models.record_foreign`, where the three are installed (bitsandbytes 0.50.2, torchao 0.18.0 and mlx
0.32.4 on a CPU), wrote the files of `tests/torch/checkpoint/foreign`: the stored tensors of `layer.weight`, what the
library reads there as `expected`, and as metadata those of torchao and the `quantization_config`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

NAME = "layer.weight"
RECORDED = Path(__file__).parents[1] / "torch" / "checkpoint" / "foreign"
Stored = dict[str, torch.Tensor]
Record = Callable[[torch.Tensor], tuple[Stored, torch.Tensor, dict[str, str], dict[str, Any]]]
"""A weight -> what is stored, the values there, the metadata of the file, and the `quantization_config`."""


def of_4_bits(table: str, twice: bool, weight: torch.Tensor) -> Any:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weight, blocksize=64 if twice else 256, quant_type=table, compress_statistics=twice
    )
    parts = {f"{NAME}.{part}": x for part, x in state.as_dict(packed=True).items()}
    expected = functional.dequantize_4bit(codes, state).float()
    return {NAME: codes, **parts}, expected, {}, {"quant_method": "bitsandbytes"}


def of_int8(weight: torch.Tensor) -> Any:
    from bitsandbytes import functional

    codes, scale, _ = functional.int8_vectorwise_quant(weight.half())
    stored = {NAME: codes, "layer.SCB": scale, "layer.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, functional.int8_vectorwise_dequant(codes, scale), {}, {"quant_method": "bitsandbytes"}


def of_torchao(config: str, options: dict[str, Any], weight: torch.Tensor) -> Any:
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    made = {key: value(quantization) if callable(value) else value for key, value in options.items()}
    module = torch.nn.ModuleDict({"layer": torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.bfloat16)})
    module["layer"].weight.data = weight.bfloat16()
    quantization.quantize_(module, getattr(quantization, config)(**made))
    stored, metadata = flatten_tensor_state_dict(module.state_dict())
    return stored, module["layer"].weight.dequantize(), metadata, {"quant_method": "torchao"}


def of_mlx(mode: str, size: int, bits: int, weight: torch.Tensor) -> Any:
    import mlx.core as mx
    import numpy as np

    stored = mx.quantize(mx.array(weight.numpy()), group_size=size, bits=bits, mode=mode)
    expected = mx.dequantize(*stored, group_size=size, bits=bits, mode=mode).astype(mx.float32)
    parts = dict(zip(("layer.weight", "layer.scales", "layer.biases"), stored, strict=False))
    config = {"quant_method": "mlx", "mode": mode, "group_size": size, "bits": bits}
    return (
        {name: torch.from_numpy(np.array(x)) for name, x in parts.items()},
        torch.from_numpy(np.array(expected)),
        {},
        config,
    )


RECORDS: dict[str, Record] = {
    **{f"{table}{' twice' if twice else ''}": partial(of_4_bits, table, twice)
       for table in ("nf4", "fp4") for twice in (False, True)},
    "llm.int8": of_int8,
    "torchao int8": partial(of_torchao, "Int8WeightOnlyConfig", {"version": 2}),
    "torchao int8 tensor": partial(of_torchao, "Int8WeightOnlyConfig",
                                   {"version": 2, "granularity": lambda q: q.PerTensor()}),
    "torchao float8": partial(of_torchao, "Float8WeightOnlyConfig", {}),
    "torchao int4": partial(of_torchao, "IntxWeightOnlyConfig",
                            {"weight_dtype": torch.int4, "granularity": lambda q: q.PerGroup(32)}),
    "torchao int3": partial(of_torchao, "IntxWeightOnlyConfig",
                            {"weight_dtype": torch.int3, "granularity": lambda q: q.PerAxis(0),
                             "mapping_type": lambda q: q.MappingType.ASYMMETRIC}),
    **{f"mlx {bits}": partial(of_mlx, "affine", size, bits)
       for bits, size in ((2, 32), (3, 64), (4, 128), (5, 32), (6, 64), (8, 128))},
    "mlx mxfp4": partial(of_mlx, "mxfp4", 32, 4),
    "mlx mxfp8": partial(of_mlx, "mxfp8", 32, 8),
    "mlx nvfp4": partial(of_mlx, "nvfp4", 16, 4),
}  # fmt: skip
"""Kind -> how its library stores a weight."""
LIBRARY = {"torchao": "torchao", "mlx": "mlx.core"}
"""First word of a kind -> the module of its library; others are of bitsandbytes."""


def file_of(kind: str) -> Path:
    """Where a kind is recorded."""
    return RECORDED / f"{kind.replace(' ', '_')}.safetensors"


def weight_of(seed: int) -> torch.Tensor:
    """A weight of 7 rows: with blocks of 256 one holds two rows, and the last is cut."""
    return torch.randn(7, 128, generator=torch.Generator().manual_seed(seed)) * 0.1


def main() -> None:
    """Write a file of each kind."""
    RECORDED.mkdir(exist_ok=True)
    for kind, record in RECORDS.items():
        stored, expected, metadata, config = record(weight_of(1))
        tensors = {name: x.contiguous() for name, x in {**stored, "expected": expected}.items()}
        save_file(tensors, file_of(kind), {**metadata, "config": json.dumps(config)})


if __name__ == "__main__":
    main()
