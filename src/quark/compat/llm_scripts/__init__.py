"""Functions of language-model scripts: loading by name, data for calibration and training, perplexity, benchmarks."""
