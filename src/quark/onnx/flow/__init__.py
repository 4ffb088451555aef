"""The flow from a model to its file: its preparation, the order of all steps, and the same for bodies of operators."""
