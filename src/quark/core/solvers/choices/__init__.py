"""Choices of least total loss, exactly: one option of each item, one side for each."""
