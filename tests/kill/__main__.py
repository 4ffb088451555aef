"""`python -m tests.kill --count 300 --seed 0`: kill jobs, look at what is left, run them again, and print figures."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# Before torch and numpy are loaded: a process with threads of theirs cannot be forked.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The checkout that this belongs to, even where another one is installed.
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def main() -> int:
    """Return 1 where a kill broke something."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--job", action="append", default=[], help="only jobs whose name contains this; repeatable")
    chosen = parser.parse_args()
    from tests.kill.cases import run_cases

    with tempfile.TemporaryDirectory() as root:
        os.environ["TMPDIR"] = tempfile.tempdir = root  # what killed children leave of their own
        return run_cases(Path(root), chosen.count, chosen.seed, chosen.job)


if __name__ == "__main__":
    sys.exit(main())
