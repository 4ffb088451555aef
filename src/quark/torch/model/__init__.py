"""Knowledge of a model: its blocks, roles, dataflow and published names."""
