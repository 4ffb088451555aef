"""`python -m benchmarks.fingerprint`: every output of the package, written once, and a hash of each.

A change of the code that is to change no result is made between two runs. The outputs are found by documented names
only, so one script serves both sides of a restructuring.
"""
