"""Reading, editing and writing ONNX graphs, and what is found in them."""
