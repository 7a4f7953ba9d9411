#!/usr/bin/env bash
# Checks and measures the CUDA path on one GPU in at most 8 minutes, without downloads.
# Usage: benchmarks/gpu/run.sh [--out FILE] [--minutes N] [--smoke]; see run.py.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "${PYTHON:-python3}" "$here/run.py" "$@"
