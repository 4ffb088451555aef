"""Mixed precision: which nodes another precision hurts least."""
