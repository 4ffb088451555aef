"""Configs that users write, in every generation of names, and their lowering to specs."""
