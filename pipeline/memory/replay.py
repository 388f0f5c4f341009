"""Events of memory, and what the simulated allocator comes to on a sequence of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.blocks import Block


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
    return AllocatorPeaks(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_alloc_retries=allocator.num_alloc_retries,
    )
