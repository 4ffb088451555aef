"""Folders of checkpoints: shards, tensors, quantization_config, loading into modules."""
