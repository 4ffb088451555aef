"""GGUF files: the format of llama.cpp and the programs around it."""
