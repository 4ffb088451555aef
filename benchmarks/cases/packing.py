"""Packing a 4096 x 4096 tensor of int4 codes into int32 words, and unpacking it, in the `reorder` nibble order.

`per_channel` packs as it is, `per_group` transposes first, as exports do. Each program packs with what its own export
calls, from the code type that it has. Medians of three after a warm-up; a round trip is checked once. `clone_seconds`
is one clone of int32 codes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SIZE = 4096


def median_seconds(action: Callable[[], object], samples: int) -> float:
    """Median CPU seconds of `action` after one uncounted call."""
    action()
    times = []
    for _ in range(samples):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return statistics.median(times)


def packer(layout: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any], torch.dtype]:
    """Pack, unpack and the type of the codes, of quark or else of the peer."""
    try:
        from quark.core.packing import pack_int4, unpack_int4
    except ImportError:
        from quark.torch.utils import create_pack_method

        peer = create_pack_method(qscheme=layout, dtype="int4")
        return (lambda c: peer.pack(c, True)), (lambda p: peer.unpack(p, True)), torch.int32
    if layout == "per_group":
        return (lambda c: pack_int4(c.t().contiguous())), (lambda p: unpack_int4(p).t()), torch.uint8
    return pack_int4, unpack_int4, torch.uint8


def run_layout(layout: str, codes: torch.Tensor) -> dict[str, float]:
    """Seconds to pack and to unpack."""
    pack, unpack, dtype = packer(layout)
    codes = codes.to(dtype) if dtype is torch.int32 else (codes & 15).to(dtype)
    packed = pack(codes)
    assert torch.equal(unpack(packed).to(codes.dtype), codes)
    return {
        "pack_seconds": median_seconds(lambda: pack(codes), 3),
        "unpack_seconds": median_seconds(lambda: unpack(packed), 3),
    }


def main() -> None:
    """Print the figures as one JSON line."""
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (SIZE, SIZE), dtype=torch.int32)
    result = {
        "benchmark": "packing",
        "layouts": {layout: run_layout(layout, codes) for layout in ("per_channel", "per_group")},
        "clone_seconds": median_seconds(codes.clone, 7),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
