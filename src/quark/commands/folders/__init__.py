"""The commands over model folders and PyTorch."""
