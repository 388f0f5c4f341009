"""Replay of a timeline on the simulated caching allocator."""

import zlib
from array import array
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.blocks import MIN_BLOCK_BYTES, Block
from pipeline.memory.timeline import Timeline

LARGEST_EXCHANGE_BYTES = 1024
"""Bytes that an optimizer step may find and free, or leave: its losses and the norm of its gradient."""


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """The peaks that the allocator reached."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int


@dataclass(frozen=True)
class Requests:
    """The allocations and frees of a timeline, compressed: thousands of them wait in one process."""

    content: bytes
    """The bytes of each storage and the events (n: allocation of storage n, -1 - n: its release), compressed arrays."""
    num_storages: int
    last_step: int
    """Index of the first event of the last optimizer step."""
    num_repeats: int
    """Optimizer steps that follow and are like the last."""

    @classmethod
    def of(cls, timeline: Timeline, num_steps: int) -> Self:
        """Return the requests of a run of `num_steps` optimizer steps whose first ones are recorded."""
        step = max(span.step for span in timeline.spans if span.phase in ("backward", "load"))
        begin = next(span.begin for span in timeline.spans if span.step == step)
        return cls(
            zlib.compress(np.concatenate([timeline.num_bytes_N, timeline.events_E]).tobytes(), level=1),
            len(timeline.num_bytes_N),
            last_step=begin,
            num_repeats=max(0, num_steps - step - 1) if _is_repeatable(timeline, begin) else 0,
        )

    @property
    def least_bytes(self) -> int:
        """Maximum of the rounded bytes in use: no allocator serves the requests with less."""
        content = np.frombuffer(zlib.decompress(self.content), np.int64)
        units, events = -(-content[: self.num_storages] // MIN_BLOCK_BYTES), content[self.num_storages :]
        return int(np.cumsum(np.where(events >= 0, units[events], -units[-1 - events])).max()) * MIN_BLOCK_BYTES

    def replay(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> AllocatorPeaks:
        """Return the peaks of an empty allocator that serves the requests; raise OutOfMemoryError above the cap.

        Free memory may be divided differently at the end of each optimizer step, so steps follow until one raises no
        peak, or the run ends.
        """
        allocator = CachingAllocator(cap_bytes=cap_bytes, expandable_segments=expandable_segments)
        live: dict[int, Block] = {}
        content = array("q", zlib.decompress(self.content))
        sizes, events = content[: self.num_storages], content[self.num_storages :]
        _serve(events, sizes, allocator, live)
        for _ in range(self.num_repeats):
            before = peaks_of(allocator)
            _serve(events[self.last_step :], sizes, allocator, live)
            if peaks_of(allocator) == before:
                break
        return peaks_of(allocator)


def _serve(events: "array[int]", sizes: "array[int]", allocator: CachingAllocator, live: dict[int, Block]) -> None:
    """Serve requests; `live` holds the block of each storage. What a step before has freed is not freed again."""
    for event in events:
        if event >= 0:
            live[event] = allocator.allocate(sizes[event])
        elif -1 - event in live:
            allocator.free(live.pop(-1 - event))


def _is_repeatable(timeline: Timeline, begin: int) -> bool:
    """Whether the step from event `begin` on leaves the storages that it found, except for the values of losses."""
    is_new, is_kept = timeline.allocated_at_N >= begin, timeline.freed_at_N == len(timeline.events_E)
    exchanged = np.where(is_new, is_kept, (timeline.freed_at_N >= begin) & ~is_kept)
    return bool(timeline.num_bytes_N[exchanged].sum() <= LARGEST_EXCHANGE_BYTES)


def peaks_of(allocator: CachingAllocator) -> AllocatorPeaks:
    """Return the peaks that an allocator has reached."""
    return AllocatorPeaks(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
    )
