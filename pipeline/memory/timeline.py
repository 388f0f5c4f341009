"""Storages of tensors over time: when each was allocated and freed, its size, and the operator that made it.

N counts storages in the order of their allocation, E events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.memory.work import Work, combined

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporary",
    "logits and loss",
    "workspaces",
)
"""Purposes of a storage: activations are kept by a forward pass for its backward pass; the rest is temporary.

The last two are told by source lines and sizes: only a memory history has them.
"""

IntArray = NDArray[np.int64]
Shape = tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Storage:
    """What is known of one storage."""

    num_bytes: int
    shape: Shape
    """Shape of the tensor that it was allocated for; empty in a memory history, which knows bytes alone."""
    dtype: str
    """As torch names it, without its package: float32."""
    operator: str
    """Name of the operator that allocated it, without its namespace."""
    module: str
    """Dotted name of the innermost module that ran the operator; `loss` or `optimizer` outside of all modules."""
    category: str
    """One of CATEGORIES."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """All allocations and releases, in their order, and the work of the phases."""

    storages: Sequence[Storage]
    """In the order of their allocation."""
    events_E: IntArray
    """n for the allocation of storage n, -1 - n for its release."""
    seconds: Sequence[float]
    """Time of each event, from the first one."""
    spans: tuple[Span, ...]
    work: tuple[PhaseWork, ...] = ()

    @cached_property
    def num_bytes_N(self) -> IntArray:
        """The size of each storage."""
        return np.array([one.num_bytes for one in self.storages], np.int64)

    def pass_work(self, num_passes: int) -> Work:
        """Return the mean work of the forward and backward passes of the last optimizer step, which has `num_passes`.

        The passes that were not recorded repeat the last one, but for what ranks exchange after the last one alone.
        """
        passes = self._passes
        mean = (sum(passes, Work()) + passes[-1] * (num_passes - len(passes))) / num_passes
        return replace(mean, sent_bytes=passes[0].sent_bytes)

    @property
    def last_pass_work(self) -> Work:
        """Return what the last pass has beside the mean one: what ranks exchange of the gradients of all passes."""
        first, *_, last = (*self._passes[:1], *self._passes)
        return Work(sent_bytes=combined(lambda one, other: max(other - one, 0), first, last).sent_bytes)

    @property
    def update_work(self) -> Work:
        """Return the work of the last optimizer step after its passes: clipping and the optimizer."""
        return self._work_of("optimizer")[0]

    @property
    def _passes(self) -> list[Work]:
        """Return the work of each recorded pass of the last optimizer step."""
        forward, backward = (self._work_of(phase) for phase in ("forward", "backward"))
        return [one + other for one, other in zip(forward, backward, strict=True)]

    def _work_of(self, phase: str) -> list[Work]:
        """Return the work of each such phase of the last optimizer step."""
        last = self.work[-1].step
        return [one.work for one in self.work if (one.step, one.phase) == (last, phase)]

    @cached_property
    def allocated_at_N(self) -> IntArray:
        """Index of the allocation of each storage among the events."""
        return np.flatnonzero(self.events_E >= 0)

    @cached_property
    def freed_at_N(self) -> IntArray:
        """Index of the release of each storage among the events; their number where it is never released."""
        freed_at_N = np.full(len(self.num_bytes_N), len(self.events_E))
        releases = np.flatnonzero(self.events_E < 0)
        freed_at_N[self.storage_E[releases]] = releases
        return freed_at_N

    @cached_property
    def allocated_bytes_E(self) -> IntArray:
        """The bytes alive after each event."""
        total: IntArray = np.cumsum(self.change_E)
        return total

    @cached_property
    def storage_E(self) -> IntArray:
        """The number of the storage of each event."""
        return np.where(self.events_E < 0, -1 - self.events_E, self.events_E)

    @cached_property
    def change_E(self) -> IntArray:
        """The bytes that each event adds to those alive."""
        num_bytes = self.num_bytes_N[self.storage_E]
        return np.where(self.events_E < 0, -num_bytes, num_bytes)

    @property
    def peak_event(self) -> int:
        """Index of the event after which most memory is alive; the timeline must not be empty."""
        return int(self.allocated_bytes_E.argmax())

    def alive(self, event: int) -> IntArray:
        """Return the numbers of the storages that are alive after event number `event`."""
        return np.flatnonzero((self.allocated_at_N <= event) & (self.freed_at_N > event))

    def span_of(self, event: int) -> Span:
        """Return the span of event number `event`."""
        return next(span for span in reversed(self.spans) if span.begin <= event)

    @property
    def ends(self) -> list[int]:
        """Index of the first event after each span."""
        return [*(span.begin for span in self.spans[1:]), len(self.events_E)]
