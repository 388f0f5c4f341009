"""Workspaces of matrix products on CUDA, which follow the version of torch.

Each thread has one of cuBLAS, taken with its first product (aten/src/ATen/cuda/CublasHandlePool.cpp). cublasLt computes
products with a bias: before torch 2.12 in a workspace of its own, then in that of cuBLAS. From 2.15 on each product
takes its workspace and frees it.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from pipeline.base.torch_version import TORCH_VERSION
from pipeline.base.units import MIB
from pipeline.memory.gradient_sums import in_backward
from pipeline.memory.inside import Buffer, Inside

aten = torch.ops.aten
PRODUCTS = (
    aten.mm.default,
    aten.mm.out,
    aten.addmm.default,
    aten.addmm.out,
    aten.addmm_.default,
    aten.bmm.default,
    aten.baddbmm.default,
)
ADDED = (aten.addmm.default, aten.addmm.out, aten.addmm_.default)
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLAS_WORKSPACE_CACHE")
"""The environment variables that change these workspaces."""


class ProductWorkspaces:
    """Returns the workspaces of a run's matrix products, call by call."""

    def __init__(
        self,
        capability: tuple[int, int],
        version: tuple[int, ...] = TORCH_VERSION,
        variables: Mapping[str, str] = os.environ,
    ) -> None:
        self._cublas = Buffer(cublas_workspace_bytes(capability, variables))
        self._cublaslt = Buffer(int(variables.get("CUBLASLT_WORKSPACE_SIZE", "1024")) * 1024)
        self._is_shared = version >= (2, 12)
        self._are_kept = version < (2, 15) or variables.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        self._kept: set[tuple[bool, Buffer]] = set()

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> Inside:
        """Return the workspaces that this product takes."""
        uses_cublaslt = operator in ADDED and _computed_by_cublaslt(args[0])
        if not self._are_kept:
            workspace = self._cublaslt if uses_cublaslt else self._cublas
            return Inside(after=(workspace, workspace))
        needed = (self._cublas, self._cublaslt) if uses_cublaslt and not self._is_shared else (self._cublas,)
        thread = in_backward()  # a backward pass has a thread of its own
        taken = tuple(workspace for workspace in needed if (thread, workspace) not in self._kept)
        self._kept.update((thread, workspace) for workspace in taken)
        return Inside(after=taken)


def cublas_workspace_bytes(capability: tuple[int, int], variables: Mapping[str, str] = os.environ) -> int:
    """Return the size of a cuBLAS workspace, which CUBLAS_WORKSPACE_CONFIG (:KiB:count, repeated) may set.

    It is that of parseChosenWorkspaceSize in CublasHandlePool.cpp.
    """
    given = re.findall(r":(\d+):(\d+)", variables.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return sum(int(size) * 1024 * int(count) for size, count in given)
    return 32 * MIB if capability[0] in (9, 10, 11, 12) else 2 * 4 * MIB + 8 * 16 * 1024


def _computed_by_cublaslt(bias: torch.Tensor) -> bool:
    """Whether cublasLt adds the bias: it is a vector, or all is in 16 bits (Blas.cpp, isInputCompliesAddmmCudaLt)."""
    return bias.dim() == 1 or (bias.dim() == 2 and bias.element_size() == 2)
