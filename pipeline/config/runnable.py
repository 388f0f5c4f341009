"""What runs in a process of its own and is measured: an Experiment, or a Command."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from pipeline.base.contracts import Prepared


class Runnable(Protocol):
    """What a run needs to know of what it runs."""

    @property
    def title(self) -> str:
        """What trains, in a few words: the model, or the command."""

    @property
    def device(self) -> torch.device:
        """The device that it trains on."""

    @property
    def effective_batch_size(self) -> int:
        """Sequences in one optimizer step."""

    @property
    def world_size(self) -> int:
        """Processes that train together."""

    @property
    def num_ranks_here(self) -> int:
        """Ranks that Fitproof starts on this machine; 0 where its process trains alone, or starts its own ranks."""

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes, if there is one."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps to train."""

    @property
    def timing_warmup_steps(self) -> int:
        """Optimizer steps at the start that are not timed."""

    @property
    def time_limit(self) -> float | None:
        """Seconds after which it is ended; None: no limit."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of its process."""

    def prepare(self) -> Prepared | None:
        """Return its corpus; None if Fitproof does not know it."""

    def params(self) -> dict[str, Any]:
        """Return every setting that the run uses by its dotted name."""

    def to_yaml(self) -> str:
        """Return the settings as YAML."""
