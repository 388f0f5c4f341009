#!/usr/bin/env bash
# What people say of training memory, measured on this machine's GPU in under 9 minutes: the short form of
# benchmarks/claims.py. Run again, it goes on with the runs that are missing; benchmarks/gpu/claims.sh --device cpu --tiny
# proves it without a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" benchmarks/claims.py --short --minutes 8 "$@"
