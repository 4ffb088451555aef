"""Address of the logger and the profiler."""
