"""What language-model scripts call: loading by name, data for calibration and training, perplexity, benchmarks."""
