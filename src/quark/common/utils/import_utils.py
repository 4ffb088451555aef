"""Address of the export for graph mode, where scripts look for it."""

from quark.torch.graph.export_for_training import export_for_training as export_for_training
