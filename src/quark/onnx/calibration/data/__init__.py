"""Calibration samples: readers, files, folders, random data."""
