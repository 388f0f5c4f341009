"""Storage lifetimes: which tensor storage was alive when, how large it was, and which operator allocated it."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "temporary")
"""What a storage is for: activations live on from a forward pass for the backward pass, the rest is temporary."""


@dataclass(kw_only=True, slots=True)
class Lifetime:
    """One storage, from its birth to its death."""

    num_bytes: int
    shape: tuple[int, ...]
    """Of the tensor that it was made for."""
    dtype: torch.dtype
    operator: str
    """Name of the operator that made it, without its namespace."""
    module: str
    """Dotted name of the innermost module whose work that was; `loss` and `optimizer` outside of all."""
    category: str
    """One of CATEGORIES."""
    born: int
    """Number of the event of its birth."""
    died: int | None = None
    """Number of the event of its death; None while it lives."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of events within one phase, which begins with a birth."""

    step: int
    """Optimizer step, counted from 0."""
    phase: str
    """`load`, `forward`, `backward` or `optimizer`; with accumulation the two in the middle alternate."""
    begin: int
    """Number of its first event."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All births and deaths, in their order."""

    lives: tuple[Lifetime, ...]
    events: tuple[int, ...]
    """n for the birth of life n, -1 - n for its death."""
    seconds: tuple[float, ...]
    """When each event happened, from the first one."""
    spans: tuple[Span, ...]
    flops: int
    """Floating-point operations of all optimizer steps recorded, recomputation included, as torch counts them."""

    @property
    def num_passes(self) -> int:
        """Return the number of forward and backward passes."""
        return sum(span.phase == "backward" for span in self.spans)

    @cached_property
    def allocated_bytes(self) -> list[int]:
        """Return the bytes alive after each event."""
        sizes = [life.num_bytes for life in self.lives]
        return list(accumulate([sizes[event] if event >= 0 else -sizes[-1 - event] for event in self.events]))

    def alive(self, event: int) -> list[Lifetime]:
        """Return what lives after event number `event`."""
        return [life for life in self.lives if life.born <= event and (life.died is None or life.died > event)]

    def span_of(self, event: int) -> Span:
        """Return the phase in which event number `event` happened."""
        return next(span for span in reversed(self.spans) if span.begin <= event)
