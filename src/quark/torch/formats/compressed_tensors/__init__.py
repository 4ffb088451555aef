"""The compressed-tensors format."""
