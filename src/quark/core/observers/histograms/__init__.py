"""The grids that observers count in, and the base of those that decide from counts."""
