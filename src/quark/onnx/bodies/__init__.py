"""Bodies of If, Loop and Scan: each a model of its own, its calibration data, and the way back."""
