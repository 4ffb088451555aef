"""The config of one tensor, the shorthands for it, their enums, observers and rules."""
