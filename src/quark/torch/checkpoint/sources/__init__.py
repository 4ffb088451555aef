"""The float tensors of a checkpoint folder, whatever it stores them in, and where those of a model lie in it."""
