"""Address of the questions about packages, and of the export for graph mode, where scripts look for it."""

from quark.installed_packages import *
from quark.torch.graph.export_for_training import export_for_training as export_for_training
