"""Latency: what the kernels of a model take on this machine, and which nodes are the faster in integers there."""
