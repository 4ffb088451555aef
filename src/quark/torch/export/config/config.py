"""Address: the documented path of the export configs."""

from quark.torch.config.export_config import *
