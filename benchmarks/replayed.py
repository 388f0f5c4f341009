"""A timeline on the simulated caching allocator, event by event."""

from collections.abc import Callable, Iterator, Mapping

from pipeline.memory.allocator import Allocation, CachingAllocator
from pipeline.memory.timeline import Lifetime, Timeline

Phase = tuple[int, str]
"""The number of an optimizer step, and `load`, `forward`, `backward` or `optimizer`."""


def served(
    timeline: Timeline,
    allocator: CachingAllocator,
    phases: Mapping[int, Phase],
    bytes_of: Callable[[Lifetime], int] = lambda lifetime: lifetime.num_bytes,
) -> Iterator[tuple[int, Phase]]:
    """Allocate and free on `allocator`; yield each event's index and phase after it was served.

    `phases` are the phases by the index of their first event.
    """
    live, phase, lifetimes = dict[int, Allocation](), phases[0], timeline.lifetimes
    for number, event in enumerate(timeline.events_E.tolist()):
        phase = phases.get(number, phase)
        if event >= 0:
            live[event] = allocator.allocate(bytes_of(lifetimes[event]))
        else:
            allocator.free(live.pop(-1 - event))
        yield number, phase
