"""Recordings of real memory, `torch.cuda.memory._snapshot()`, as events that the simulated allocator replays."""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, NamedTuple

from pipeline.base.errors import InvalidInputError
from pipeline.memory.allocator import Allocation as Allocated
from pipeline.memory.allocator import CachingAllocator
from pipeline.memory.replay import AllocatorPeaks, peaks_of


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


def replay(
    events: Iterable[Event], *, cap_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorPeaks:
    """Replay the events on an empty allocator, and return its peaks.

    Raises:
        OutOfMemoryError: a request exceeds the cap.

    """
    allocator = CachingAllocator(cap_bytes=cap_bytes, expandable_segments=expandable_segments)
    live: dict[int, Allocated] = {}
    for event in events:
        if isinstance(event, Allocation):
            live[event.identifier] = allocator.allocate(
                event.size_bytes, stream=event.stream, segment_address=event.segment_address
            )
        elif isinstance(event, Free):
            allocator.free(live.pop(event.identifier))
        else:
            allocator.empty_cache()
    return peaks_of(allocator)


def events_of(snapshot: Mapping[str, Any], device_index: int = 0) -> list[Event]:
    """Return the events on one device while `_record_memory_history()` was on, oldest first.

    Blocks that were allocated before come first, by address. A recording does not contain what was cached before: for
    exact peaks, record from the first allocation, or right after empty_cache(). A block is free after its event
    `free_completed`, which is later than `free_requested` where another stream still used it (record_stream).

    Raises:
        InvalidInputError: it has private pools, or lacks frees.

    """
    trace = snapshot["device_traces"][device_index]
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device_index]
    if any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in segments):
        raise InvalidInputError(
            "a recording must not have private memory pools; record without CUDA graphs and torch.cuda.MemPool"
        )
    identifiers = count()
    alive_before: dict[int, Allocation] = {}
    alive: dict[int, int] = {}
    segment_addresses: dict[int, int] = {}
    events: list[Event] = []
    for entry in trace:
        action, stream = entry["action"], entry["stream"]
        if action == "alloc":
            if entry["addr"] in alive:
                raise InvalidInputError(
                    f"a recording must have every free_completed, and that of address {entry['addr']:#x} is missing; "
                    "record without skip_actions"
                )
            alive[entry["addr"]] = identifier = next(identifiers)
            events.append(Allocation(identifier, entry["size"], stream, segment_addresses.pop(stream, None)))
        elif action == "free_completed":
            if entry["addr"] not in alive:
                alive_before[entry["addr"]] = Allocation(next(identifiers), entry["size"], stream)
                alive[entry["addr"]] = alive_before[entry["addr"]].identifier
            events.append(Free(alive.pop(entry["addr"])))
        elif action == "segment_alloc":
            segment_addresses[stream] = entry["addr"]
        elif action in ("segment_free", "segment_unmap") and events[-1:] != [EmptyCache()]:
            events.append(EmptyCache())
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in alive:
                alive_before[block["address"]] = Allocation(
                    next(identifiers), block["requested_size"], segment["stream"]
                )
    return [alive_before[address] for address in sorted(alive_before)] + events
