"""Events of memory, and what the simulated allocator comes to on a sequence of them."""

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
    """By which the block is freed later."""
    size_bytes: int
    stream: int = 0
    segment_address: int | None = None
    """Where the device put the new segment, if one was needed and this is known."""


class Free(NamedTuple):
    """The end of an allocation."""

    identifier: int


class EmptyCache(NamedTuple):
    """A call of torch.cuda.empty_cache."""


Event = Allocation | Free | EmptyCache


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """What a sequence of events came to."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_alloc_retries: int


def replay(
    events: Iterable[Event], *, cap_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorPeaks:
    """Return the peaks that an empty allocator reaches on these events.

    Raises:
        OutOfMemoryError: the cap does not allow one of them.

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
    """Allocations and frees alone, in little space and replayed in little time."""

    sizes: "array[int]"
    """Bytes of each storage."""
    events: "array[int]"
    """n for the birth of storage n, -1 - n for its death."""

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """Return what a timeline asks for."""
        return cls(array("q", [life.num_bytes for life in timeline.lives]), array("q", timeline.events))

    def replay(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> AllocatorPeaks:
        """Return the peaks that an empty allocator reaches on them, or raise as the function of this name does."""
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
