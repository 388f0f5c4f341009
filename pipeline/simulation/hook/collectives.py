"""Lets torch's watchdog of NCCL see in each iteration that the collectives of the one before it have ended.

A collective that nobody waited for, but for its future, holds its tensors until torch's watchdog, which looks every
100 ms, has seen that it ended, and another one begins. An iteration on a card that computes nothing may take less than
these 100 ms, so each waits until the watchdog has looked.

The shapes of parameters that DistributedDataParallel compares between processes are taken to be equal.
"""

import atexit
import ctypes
import time
from typing import Any

from torch.nn.parallel import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

LONGEST_SECONDS = 0.5
"""How long the watchdog is waited for: several times of its looking."""
PAUSE_SECONDS = 0.002
"""Between two looks at what the watchdog has seen, and until it has put that aside."""

_card = ctypes.CDLL(None)
_have_stepped: set[int] = set()
"""The optimizers that have taken a step in this iteration, by their id()."""


def _wait_for_watchdog() -> None:
    if not _card.card_num_unseen_collectives():
        return
    until = time.monotonic() + LONGEST_SECONDS
    while _card.card_num_unseen_collectives() and time.monotonic() < until:
        time.sleep(PAUSE_SECONDS)
    time.sleep(PAUSE_SECONDS)


def _before_step(optimizer: Any, *_: Any) -> None:
    """Begin an iteration if an optimizer is about to step that has stepped in this one."""
    if id(optimizer) in _have_stepped:
        _have_stepped.clear()
        _card.card_begin_iteration()
        _wait_for_watchdog()
    _have_stepped.add(id(optimizer))


def _at_exit() -> None:
    """Leave the watchdog nothing to see, which runs on while torch is taken apart."""
    _card.cudaDeviceSynchronize()
    _wait_for_watchdog()


if __name__ == "simulated_card_hook":
    distributed._verify_param_shape_across_processes = lambda *_, **__: None  # type: ignore[attr-defined]
    _before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # it is no part of a compiled step
    register_optimizer_step_pre_hook(_before_step)
    atexit.register(_at_exit)
