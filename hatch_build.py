"""Build hook: a wheel holds the modules of the documented paths as files, for type checkers, editors and packagers.

They are made from src/quark/compat/paths.txt. An editable installation has none of them; there
quark.compat.documented_paths makes the modules when they are imported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DocumentedPathsHook(BuildHookInterface[Any]):
    """Adds a file for each documented path to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from quark.compat.documented_paths import write_files

        build_data["force_include"] |= {str(file): inside for inside, file in write_files(Path(tempfile.mkdtemp()))}
