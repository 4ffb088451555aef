"""`python -m tests.fuzz`: makes cases from a seed, runs and judges them, and shows those that break a promise."""

from __future__ import annotations

import argparse
import os
import sys

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "ORT_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
"""One thread: a fork of several may wait for one that it does not have."""


def main() -> int:
    """Print a table and the cases that are neither clear nor right; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="in all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", help="only of this kind; repeatable")
    parser.add_argument("--case", type=int, help="only this number, of --kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="after which a case hangs")
    parser.add_argument("--keep", help="folder in which the inputs and the printed lines of each case stay")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # Loads torch and onnxruntime, which read the environment: after it is set.
    from tests.fuzz.campaign import Campaign

    return Campaign(
        cases=options.cases, seed=options.seed, kinds=options.kind, case=options.case, seconds=options.seconds,
        keep=options.keep,
    ).run()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
