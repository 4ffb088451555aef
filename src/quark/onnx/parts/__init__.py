"""Parts: what a Concat joins into one tensor, as boxes and scores, each with a range and a verdict of its own."""
