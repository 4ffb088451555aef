"""What is wanted of one tensor: its config, the shorthands for it, their enums, observers and rules."""
