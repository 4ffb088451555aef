"""Writers of whole models: safetensors folders, GGUF files, ONNX files."""
