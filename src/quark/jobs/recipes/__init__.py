"""Recipes: what a command was told, as a file that makes the same again."""
