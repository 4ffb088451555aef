"""Progress of a long job: lines, bars on a terminal, lines of JSON."""

from quark.base.progress.bar_display import bars
from quark.base.progress.events import check_log, log_to, write_event
from quark.base.progress.loops import OUTPUT_ERROR, progress, report, status
from quark.base.progress.seconds_and_peak import peak_mb, seconds_text

__all__ = [
    "OUTPUT_ERROR", "bars", "check_log", "log_to", "peak_mb", "progress", "report", "seconds_text", "status",
    "write_event",
]  # fmt: skip
