"""An ONNX layer for AdaRound and AdaQuant: rows to learn from, and parameters that can be obeyed."""
