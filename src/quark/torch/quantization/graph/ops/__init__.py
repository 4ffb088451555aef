"""Address of the operators of graph mode."""
