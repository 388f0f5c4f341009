#!/bin/sh
# Headroom and its peers on a GPU, in under 9 minutes; the same command goes on where the time was over.
#   benchmarks/gpu/peers.sh                       writes benchmarks/peers_cuda_<date>.csv, .md and .png
#   benchmarks/gpu/peers.sh --device cpu --tiny   the same without a GPU
set -e
cd "$(dirname "$0")/../.."
exec env PYTHONPATH=. python benchmarks/peers.py --device cuda --seconds 480 "$@"
