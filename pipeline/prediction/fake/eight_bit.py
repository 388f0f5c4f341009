"""bitsandbytes' 8-bit AdamW on fake tensors: its own step, but for what reads values or is not torch's memory.

The maps of its codes are read while they are made. On a CPU its operators are functions of torch's operators, which are
run in their place, so that what they allocate is seen.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pipeline.config.experiment import Experiment

CODES = 256
"""Numbers that 8 bits can have: those of a state, or of a scale that is quantized itself."""


@contextmanager
def quantized_states(experiment: Experiment) -> Iterator[None]:
    """Replace functions of bitsandbytes, if the experiment uses them, and restore them on exit.

    Enter it before any tensor is fake: bitsandbytes makes tensors as it is imported.
    """
    settings: Any = experiment.settings
    if not settings.optimizer.endswith("8bit"):
        yield
        return
    functional, on_cpu = import_module("bitsandbytes.functional"), import_module("bitsandbytes.backends.cpu.ops")
    updates = ("optimizer_update_8bit_blockwise", "optimizer_update_32bit")
    replaced: list[tuple[Any, str, Any]] = [
        (functional, "create_dynamic_map", unread_map),
        *((torch.ops.bitsandbytes, name, getattr(on_cpu, f"_{name}_cpu")) for name in updates),
    ]
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def unread_map(*_: Any, **__: Any) -> Tensor:
    """Return a map of 8-bit codes in place of bitsandbytes' create_dynamic_map, which reads it."""
    return torch.empty(CODES)
