"""The ground that everything stands on: files, logs, progress, checks of values that come from outside."""
