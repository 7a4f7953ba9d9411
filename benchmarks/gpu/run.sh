#!/usr/bin/env bash
# Checks and measures the CUDA path on one GPU in at most 8 minutes, without downloads, with the
# `python` of the environment. Usage: run.sh [--out FILE] [--minutes N] [--smoke]; see run.py.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec python "$here/run.py" "$@"
