"""Replay of a timeline on the simulated caching allocator."""

import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.blocks import MIN_BLOCK_BYTES, SMALL_BYTES, Block, Pool
from pipeline.memory.timeline import IntArray, Timeline

LARGEST_EXCHANGE_BYTES = 1024
"""Bytes that an optimizer step may find and free, or leave: its losses and the norm of its gradient."""

NUM_PARTS = 5
"""Parts of an optimizer step at whose beginnings an allocator is compared with itself a step before."""


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
        sizes, events = self._sizes_and_events()
        return int(np.cumsum(np.where(events >= 0, sizes[events], -sizes[-1 - events])).max()) * MIN_BLOCK_BYTES

    def replay(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> AllocatorPeaks:
        """Return the peaks of an empty allocator that serves the requests; raise OutOfMemoryError above the cap.

        Free memory may be divided differently at the end of each optimizer step, so steps follow until one raises no
        peak, or the run ends.
        """
        allocator = CachingAllocator(cap_bytes=cap_bytes, expandable_segments=expandable_segments)
        run = _Run(allocator, *self._sizes_and_events(), self.last_step)
        run.serve_all()
        for _ in range(self.num_repeats):
            before = peaks_of(allocator)
            run.serve_last_step()
            if peaks_of(allocator) == before:
                break
        return peaks_of(allocator)

    def _sizes_and_events(self) -> tuple[IntArray, IntArray]:
        content = np.frombuffer(zlib.decompress(self.content), np.int64)
        return -(-content[: self.num_storages] // MIN_BLOCK_BYTES), content[self.num_storages :]


class _Run:
    """The requests of a run, served by an allocator.

    Without a cap the pools are independent. Then each serves many requests at once, and no more of a step when it is as
    it was there in the step before.
    """

    def __init__(self, allocator: CachingAllocator, sizes_N: IntArray, events_E: IntArray, last_step: int) -> None:
        self._allocator = allocator
        self._sizes, self._block_sizes_N, self._allocated_size = sizes_N.tolist(), sizes_N.copy(), 0
        self._events_E, self._last_step = events_E, last_step
        self._storages_E = np.where(events_E >= 0, events_E, -1 - events_E)
        self._sizes_E = sizes_N[self._storages_E]
        self._live = defaultdict[Pool, dict[int, Block]](dict)
        self._states: dict[int, tuple[list[int], dict[int, Block]]] = {}
        self._larger: dict[int, dict[int, int]] = {}
        self._repeating: set[Pool] = set()

    def serve_all(self) -> None:
        """Serve all requests."""
        self._serve(np.arange(len(self._events_E)))

    def serve_last_step(self) -> None:
        """Serve those of the last step, but for the releases of what a step before had left."""
        first = np.count_nonzero(self._events_E[: self._last_step] >= 0)  # storage that the last step allocates
        of_step_E = self._storages_E[self._last_step :] >= first
        self._serve(self._last_step + np.flatnonzero(of_step_E))

    def _serve(self, indices: IntArray) -> None:
        before, self._larger = self._larger, {}
        for number, (pool, events) in enumerate(self._by_pool(indices)):
            live = self._live[pool]
            if self._allocator.cap_bytes is None:
                state = pool.free_blocks.copy(), live.copy()
                if pool in self._repeating or state == self._states.get(number):
                    self._repeating.add(pool)
                    self._larger[number] = before[number]
                    continue
                self._states[number] = state
            self._larger[number] = pool.serve(events, self._sizes, live)
        self._count(indices)

    def _by_pool(self, indices: IntArray) -> Iterator[tuple[Pool, list[int]]]:
        """Yield the requests that a pool serves at once."""
        pools = [self._allocator.pool(0, small=small) for small in (False, True)]
        is_small_E = self._sizes_E <= SMALL_BYTES // MIN_BLOCK_BYTES
        indices = indices[self._sizes_E[indices] > 0]
        if self._allocator.cap_bytes is None:
            parts = np.linspace(self._last_step, len(self._events_E), NUM_PARTS + 1, dtype=np.int64)
            for small, pool in enumerate(pools):
                of_pool = indices[is_small_E[indices] == small]
                events = self._events_E[of_pool].tolist()
                cuts = [0, *np.searchsorted(of_pool, parts).tolist()]
                yield from ((pool, events[begin:end]) for begin, end in pairwise(cuts))
        else:
            events, is_small = self._events_E[indices].tolist(), is_small_E[indices].astype(int)
            cuts = [*np.flatnonzero(np.diff(is_small, prepend=-1)).tolist(), len(events)]
            yield from ((pools[is_small[begin]], events[begin:end]) for begin, end in pairwise(cuts))

    def _count(self, indices: IntArray) -> None:
        """Count the allocated bytes."""
        events_E, storages_E = self._events_E[indices], self._storages_E[indices]
        is_new_E = events_E >= 0
        self._block_sizes_N[storages_E[is_new_E]] = self._sizes_E[indices][is_new_E]
        for larger in filter(None, self._larger.values()):
            self._block_sizes_N[list(larger)] = list(larger.values())
        sizes_E = self._block_sizes_N[storages_E]
        allocated_E = self._allocated_size + np.cumsum(np.where(is_new_E, sizes_E, -sizes_E))
        self._allocated_size = int(allocated_E[-1])
        peak_bytes = int(allocated_E.max()) * MIN_BLOCK_BYTES
        self._allocator.peak_allocated_bytes = max(self._allocator.peak_allocated_bytes, peak_bytes)


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
