"""bitsandbytes' 8-bit AdamW on fake tensors: its own step, but for what reads values or is not torch's memory.

The maps of its codes are read while they are made. On a CPU its operators are functions of torch's operators, which are
run in their place, so that what they allocate is seen; on CUDA their kernels allocate nothing. Its paged states are in
CUDA's managed memory, which torch's allocator does not count.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipeline.base.contracts import Hardware
from pipeline.config.experiment import Experiment
from pipeline.prediction.fake_card import HOST

CODES = 256
"""Numbers that a state of 8 bits can have."""
SMALLEST_PAGED = 100_000
"""Elements of a parameter from which on its state is paged (bitsandbytes, Optimizer8bit.get_state_buffer)."""


@contextmanager
def quantized_states(experiment: Experiment, target: Hardware) -> Iterator[None]:
    """Replace functions of bitsandbytes, if the experiment uses them, and restore them on exit.

    Enter it before any tensor is fake: bitsandbytes makes tensors as it is imported.
    """
    settings: Any = experiment.settings
    if not settings.optimizer.endswith("8bit"):
        yield
        return
    functional = import_module("bitsandbytes.functional")
    optimizer = import_module("bitsandbytes.optim.optimizer").Optimizer8bit
    replaced: list[tuple[Any, str, Any]] = [(functional, "create_dynamic_map", _unread_map)]
    if target.kind == "cuda":
        replaced += [(optimizer, "get_state_buffer", _state_on_card), (optimizer, "prefetch_state", _stay)]
    else:
        on_cpu = import_module("bitsandbytes.backends.cpu.ops")
        for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
            replaced.append((torch.ops.bitsandbytes, name, getattr(on_cpu, f"_{name}_cpu")))
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def _unread_map(*_: Any, **__: Any) -> Tensor:
    return torch.empty(CODES)


def _state_on_card(optimizer: Any, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a state, on HOST if it is paged."""
    if not optimizer.is_paged or parameter.numel() < SMALLEST_PAGED:
        return torch.zeros_like(parameter, dtype=dtype)
    state = torch.empty_like(parameter, dtype=dtype, device=HOST)
    state.is_paged = True  # type: ignore[attr-defined]
    return state


def _stay(*_: Any) -> None:
    """Leave a paged state where it is."""
