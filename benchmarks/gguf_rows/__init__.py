"""Which architectures llama.cpp computes from our GGUF files as the float model does."""
