"""Which algorithm runs on which family of the installed transformers, on tiny models with random weights."""
