"""Replay of memory events on the simulated caching allocator."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.blocks import Block
from pipeline.memory.timeline import Timeline


class Allocation(NamedTuple):
    """A request for memory."""

    identifier: int
    """Names the block when it is freed."""
    size_bytes: int
    stream: int = 0
    segment_address: int | None = None
    """Address of the new segment, if one was needed and the address is known."""


class Free(NamedTuple):
    """A block is freed."""

    identifier: int


class EmptyCache(NamedTuple):
    """A call of torch.cuda.empty_cache."""


Event = Allocation | Free | EmptyCache


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """The peaks that the allocator reached."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int


def replay(
    events: Iterable[Event], *, cap_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorPeaks:
    """Replay the events on an empty allocator, and return its peaks.

    Raises:
        OutOfMemoryError: a request exceeds the cap.

    """
    allocator = CachingAllocator(cap_bytes=cap_bytes, expandable_segments=expandable_segments)
    live: dict[int, Block] = {}
    for event in events:
        if isinstance(event, Allocation):
            live[event.identifier] = allocator.allocate(
                event.size_bytes, stream=event.stream, segment_address=event.segment_address
            )
        elif isinstance(event, Free):
            allocator.free(live.pop(event.identifier))
        else:
            allocator.empty_cache()
    return _peaks(allocator)


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
        return _peaks(allocator)


def _peaks(allocator: CachingAllocator) -> AllocatorPeaks:
    return AllocatorPeaks(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
    )
