"""What AdaRound and AdaQuant need of an ONNX layer: rows to learn from, and parameters that can be obeyed."""
