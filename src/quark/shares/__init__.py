"""Address of the logger and the profiler of older scripts."""
