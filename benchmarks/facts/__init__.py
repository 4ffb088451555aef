"""Facts of programs, seen once more on this machine: python -m benchmarks.facts."""
