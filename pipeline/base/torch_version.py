"""The version of torch, for rules of its builds for CUDA that a build for a CPU can tell by nothing else."""

import torch

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""Major and minor version."""
SUPPORTED = "2.9 to 2.15"
"""The versions that pyproject.toml allows: predictions know what each of them allocates."""
