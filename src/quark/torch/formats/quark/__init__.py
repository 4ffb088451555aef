"""The quark format."""
