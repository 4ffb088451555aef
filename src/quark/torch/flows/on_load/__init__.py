"""Quantizing while another library loads: each layer when its tensors are read, so no float model lies in memory."""
