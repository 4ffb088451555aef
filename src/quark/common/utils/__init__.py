"""Address."""
