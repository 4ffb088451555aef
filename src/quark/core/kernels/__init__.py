"""What kernels of a GPU compute in one launch each, and when they are trusted."""
