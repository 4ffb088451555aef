#!/usr/bin/env bash
# Make the virtual environment of the peer (AMD Quark) that the scripts beside this file run in.
#
#   benchmarks/cases/setup_peer.sh [VENV] [PYTHON]
#
# VENV    where to make it (default: .venv-peer in the repository root); it must not exist yet
# PYTHON  the interpreter to make it with, 3.11 to 3.13 (default: python3)
#
# torch goes first and stays pinned. Set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to choose a CPU
# wheel; plain PyPI brings the CUDA build. The last step builds the peer's C++ extension, which
# needs g++.
set -euo pipefail

TORCH=torch==2.13.0
PEER='amd-quark>=0.13,<0.14'
# needed by the peer, but not declared by it
UNDECLARED=(transformers safetensors accelerate datasets onnxruntime)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-$root/.venv-peer}
python=${2:-python3}

if [[ -e $venv ]]; then
    echo "setup_peer.sh: $venv exists; remove it first" >&2
    exit 1
fi

"$python" -m venv "$venv"
constraints=$venv/constraints.txt
echo "$TORCH" >"$constraints"

pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet)
"${pip[@]}" "$TORCH"
"${pip[@]}" --constraint "$constraints" "$PEER" "${UNDECLARED[@]}"

# PATH: the JIT build at the first import looks for ninja there
PATH=$venv/bin:$PATH "$venv/bin/python" - <<'EOF'
from importlib.metadata import version

import quark.torch  # noqa: F401

print("peer ready:", ", ".join(f"{name} {version(name)}" for name in ("amd-quark", "torch", "transformers")))
EOF
