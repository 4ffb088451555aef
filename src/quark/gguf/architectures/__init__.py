"""What GGUF files of each architecture hold: a row for each, and the metadata that readers build models from."""
