"""The rules of the NPU's convolution engine (DPU) for an XINT8 model: positions that its shifters reach, and operators
computed as it computes them. A new rule is a function in `rules.py` and a line in its table; a conversion likewise.
"""
