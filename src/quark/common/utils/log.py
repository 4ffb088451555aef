"""Address of the logger. The code is in quark.log."""

from quark.log import ScreenLogger as ScreenLogger
from quark.log import log_errors as log_errors
