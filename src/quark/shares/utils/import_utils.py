"""Address of the questions about packages, for older scripts. The code is in quark.installed_packages."""

from quark.installed_packages import *
