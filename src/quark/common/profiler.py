"""Address of the profiler. The code is in quark.profiler."""

from quark.profiler import *
