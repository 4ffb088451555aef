"""Kills long jobs at each of their file events and at random moments, and looks at what is left."""
