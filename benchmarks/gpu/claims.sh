#!/usr/bin/env bash
# What people say about training memory, measured on this machine's GPU: the short form of benchmarks/claims.py, in under
# 9 minutes. Run it again and it continues with the commands that are missing; benchmarks/gpu/claims.sh --device cpu --tiny
# shows without a GPU that it works.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" benchmarks/claims.py --short --minutes 8 "$@"
