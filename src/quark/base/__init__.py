"""What everything stands on: files, logs, progress, checks of what comes from outside."""
