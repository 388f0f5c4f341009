"""Storage lifetimes: when each tensor storage was allocated and freed, its size, and the operator that made it."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from pipeline.memory.work import Work

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
"""Purposes of a storage: activations are kept by a forward pass for its backward pass; the rest is temporary."""


@dataclass(kw_only=True, slots=True)
class Lifetime:
    """One storage, from its allocation to its release."""

    num_bytes: int
    shape: tuple[int, ...]
    """Shape of the tensor that it was allocated for."""
    dtype: torch.dtype
    operator: str
    """Name of the operator that allocated it, without its namespace."""
    module: str
    """Dotted name of the innermost module that ran the operator; `loss` or `optimizer` outside of all modules."""
    category: str
    """One of CATEGORIES."""
    allocated_at: int
    """Index of its allocation among the events."""
    freed_at: int | None = None
    """Index of its release among the events; None while it is alive."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive events within one phase; the first is an allocation."""

    step: int
    """Optimizer step, counted from 0."""
    phase: str
    """`load`, `forward`, `backward` or `optimizer`; with accumulation, forward and backward alternate."""
    begin: int
    """Index of its first event."""


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """The work of one phase."""

    step: int
    """Optimizer step, counted from 0."""
    phase: str
    """`data`, `forward`, `backward` or `optimizer`; with accumulation, forward and backward alternate."""
    work: Work


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All allocations and releases, in their order, and the work of the phases."""

    lifetimes: tuple[Lifetime, ...]
    events: tuple[int, ...]
    """n for the allocation of storage n, -1 - n for its release."""
    seconds: tuple[float, ...]
    """Time of each event, from the first one."""
    spans: tuple[Span, ...]
    work: tuple[PhaseWork, ...]

    def pass_work(self, num_passes: int) -> Work:
        """Return the mean work of the forward and backward passes of the last optimizer step, which has `num_passes`.

        The passes that were not recorded repeat the last one.
        """
        forward, backward = (self._work_of(phase) for phase in ("forward", "backward"))
        passes = [one + other for one, other in zip(forward, backward, strict=True)]
        return (sum(passes, Work()) + passes[-1] * (num_passes - len(passes))) / num_passes

    @property
    def update_work(self) -> Work:
        """Return the work of the last optimizer step after its passes: clipping and the optimizer."""
        return self._work_of("optimizer")[0]

    def _work_of(self, phase: str) -> list[Work]:
        """Return the work of each such phase of the last optimizer step."""
        last = self.work[-1].step
        return [one.work for one in self.work if (one.step, one.phase) == (last, phase)]

    @cached_property
    def allocated_bytes(self) -> list[int]:
        """Return the bytes alive after each event."""
        sizes = [lifetime.num_bytes for lifetime in self.lifetimes]
        return list(accumulate([sizes[event] if event >= 0 else -sizes[-1 - event] for event in self.events]))

    def alive(self, event: int) -> list[Lifetime]:
        """Return the storages that are alive after event number `event`."""
        return [
            lifetime
            for lifetime in self.lifetimes
            if lifetime.allocated_at <= event and (lifetime.freed_at is None or lifetime.freed_at > event)
        ]

    def span_of(self, event: int) -> Span:
        """Return the span of event number `event`."""
        return next(span for span in reversed(self.spans) if span.begin <= event)
