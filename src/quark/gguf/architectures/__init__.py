"""Contents of GGUF files by architecture: a row for each, and the metadata that readers build models from."""
