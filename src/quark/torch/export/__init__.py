"""Address: the documented path of the exporters."""

from quark.torch.config.export_config import *
from quark.torch.writers.safetensors import ModelExporter as ModelExporter
