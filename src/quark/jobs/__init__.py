"""Jobs: what was asked for as one object, what is done for it, and the doing.

    JobRequest  --resolve-->  Job  --run-->  Result

The command line, a recipe and the Python call each make a request. Nothing here prints: what is worth showing is in
the result, or is told on the way.
"""

from quark.jobs.folders.job import FolderJob as FolderJob
from quark.jobs.request import FileRequest as FileRequest
from quark.jobs.request import FolderRequest as FolderRequest
from quark.jobs.request import JobRequest as JobRequest
from quark.jobs.request import request_of as request_of
from quark.jobs.resolve import FileJob as FileJob
from quark.jobs.resolve import resolve as resolve
