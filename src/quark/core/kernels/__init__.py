"""What kernels of a GPU compute in one launch each, and compiled code in one pass; when kernels are trusted."""
