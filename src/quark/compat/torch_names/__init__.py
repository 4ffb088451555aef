"""Names of the PyTorch flow that are documented, and that no job needs."""
