"""Replay of a timeline on the simulated caching allocator."""

from array import array
from dataclasses import dataclass
from typing import Self

from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.blocks import Block
from pipeline.memory.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """The peaks that the allocator reached."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int


@dataclass(frozen=True)
class Requests:
    """The allocations and frees of a timeline, in a compact form that is replayed fast."""

    sizes: "array[int]"
    """Bytes of each storage."""
    events: "array[int]"
    """n for the allocation of storage n, -1 - n for its release."""

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Return the requests of a timeline."""
        return cls(array("q", [lifetime.num_bytes for lifetime in timeline.lifetimes]), array("q", timeline.events))

    def replay(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> AllocatorPeaks:
        """Return the peaks of an empty allocator that serves the requests; raise OutOfMemoryError above the cap."""
        allocator = CachingAllocator(cap_bytes=cap_bytes, expandable_segments=expandable_segments)
        live: dict[int, Block] = {}
        for event in self.events:
            if event >= 0:
                live[event] = allocator.allocate(self.sizes[event])
            else:
                allocator.free(live.pop(-1 - event))
        return peaks_of(allocator)


def peaks_of(allocator: CachingAllocator) -> AllocatorPeaks:
    """Return the peaks that an allocator has reached."""
    return AllocatorPeaks(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
    )
