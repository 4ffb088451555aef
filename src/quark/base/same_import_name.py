"""amd-quark is imported as `quark`, too: both packages own that folder, and the one installed last overwrites files.

openquark last    `quark` is openquark; files of amd-quark alone lie between its own
amd-quark last    `quark/__init__.py` and others are those of amd-quark: the program `quark` is what openquark has left
one uninstalled   the files of both are gone with it, so that the other has to be installed again
"""

from __future__ import annotations

import os
from pathlib import Path

TYPE_CHECKING = False  # that of typing takes long to read
if TYPE_CHECKING:
    from types import ModuleType

OTHER = "amd-quark"
AGAIN = "pip install --force-reinstall --no-deps openquark"
"""Brings back the files that both have."""


def other_version(site: Path) -> str | None:
    """The version of amd-quark that is installed into a folder of packages; None where it is not.

    Args:
        site: The folder that has `quark`.
    """
    try:
        with os.scandir(site) as entries:
            names = [entry.name for entry in entries]
    except OSError:  # an archive
        return None
    start, end = "amd_quark-", ".dist-info"
    return next((name[len(start) : -len(end)] for name in names if name.startswith(start) and name.endswith(end)), None)


def say_other(package: Path) -> None:
    """Log that amd-quark is installed beside this package, if it is: one look at the names in a folder.

    Args:
        package: The folder of `quark`.
    """
    version = other_version(package.parent)
    if version is not None:
        from quark.base.log import logger  # where there is something to say

        logger.warning("%s", both_said(version))


def both_said(version: str) -> str:
    """The line for an environment with both, openquark installed last: what it means, and what is possible."""
    return (
        f"{OTHER} {version} is installed in the same environment, and is imported as quark, too: quark is openquark "
        f"here, and {OTHER} does not work. Possible: pip uninstall {OTHER}, then {AGAIN}; or a virtual environment for "
        "each."
    )


def why_mixed(package: ModuleType) -> str | None:
    """Why the files of `quark` are not those of openquark, and what is possible; None where they are.

    Args:
        package: The module `quark` that Python has imported: with another `__init__.py`, or with none, it has no calls.
    """
    if hasattr(package, "CALLS"):
        return None
    place = Path(next(iter(package.__path__)))
    version, altered = other_version(place.parent), altered_files()
    files = f"{len(altered)} files, {altered[0]} among them," if altered else "Files"
    lost = f"{files} of openquark in {place} are overwritten or gone"
    if version is None:
        return f"{lost}: so uninstalling {OTHER} leaves it, which has files of the same names. Possible: {AGAIN}."
    return (
        f"{lost}: {OTHER} {version}, which is imported as quark, too, was installed over it. Possible: pip uninstall "
        f"{OTHER}, then {AGAIN}; or a virtual environment for each."
    )


def altered_files() -> list[str]:
    """The files of the package whose contents are not those that were installed, by the RECORD, or that are gone."""
    import base64
    import hashlib
    from importlib import metadata

    altered = []
    for file in metadata.files("openquark") or ():
        if file.hash is None or file.parts[0] != "quark":
            continue
        path = Path(file.locate())
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else None
        if digest is None or base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            altered.append(str(file))
    return sorted(altered)
