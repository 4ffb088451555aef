"""From the documented configs and options to Settings."""
