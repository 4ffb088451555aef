"""The `gptq` format, and the folders of other programs that hold the same tensors."""
