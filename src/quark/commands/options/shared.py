"""Options that other commands share with `quark quantize`: the same words, and the same help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from quark.commands.options.of_request import option_for

ReportFile = Annotated[Path | None, option_for("report")]
LogFileOption = Annotated[Path | None, option_for("log_file")]
Device = Annotated[str, option_for("device")]
Dtype = Annotated[str, option_for("dtype")]
TrustRemoteCode = Annotated[bool, option_for("trust_remote_code")]
KeepUnexpected = Annotated[bool, option_for("keep_unexpected")]
BatchSize = Annotated[int | None, option_for("batch_size")]
Mean = Annotated[str | None, option_for("mean")]
Std = Annotated[str | None, option_for("std")]
