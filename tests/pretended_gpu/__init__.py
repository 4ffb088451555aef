"""A pretended GPU: tensors that say they are on cuda:0 or cuda:1, kept apart from the CPU's, computed on the CPU.

    with PretendedGpu() as gpu:
        model.to("cuda")
        ...
        print(gpu.meter.launches, gpu.meter.waits)

What it holds a program to, and counts, is in `tensor.py`, `copies.py` and `meter.py`. What it cannot tell: the
arithmetic of a real GPU's kernels, how long anything takes, and what runs out of memory.
"""

from tests.pretended_gpu.gpu import PretendedGpu
from tests.pretended_gpu.meter import Meter
from tests.pretended_gpu.tensor import DeviceTensor, on_host

__all__ = ["DeviceTensor", "Meter", "PretendedGpu", "on_host"]
