"""Flows that never hold the whole model: file to file, streamed from disk, block by block."""
