"""How a folder and a call of a diffusers network are known. Nothing is imported: commands ask before torch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASS, STEM = "_class_name", "diffusion_pytorch_model"
TIMESTEPS = ("timestep", "timesteps", "t", "sigma", "timestep_ratio")
"""The argument of denoisers for how much noise there is; no other network of a pipeline has one."""


def is_component(config: Mapping[str, Any]) -> bool:
    """Return True where a config.json is that of a network of diffusers."""
    return isinstance(config.get(CLASS), str) and "model_type" not in config
