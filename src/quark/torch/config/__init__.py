"""What users write, in every generation of names, and its lowering to specs."""
