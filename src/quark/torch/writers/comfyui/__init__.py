"""Denoisers of image and video models as one file for ComfyUI: scaled safetensors, or GGUF for ComfyUI-GGUF."""
