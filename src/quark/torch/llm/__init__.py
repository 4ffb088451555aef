"""Language models of scripts: loading by name, calibration and evaluation text, perplexity, benchmarks."""
