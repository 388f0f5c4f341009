"""Blocks of device memory, and pools of free blocks in best-fit order: the base of both kinds of segments.

This file, segments.py and allocator.py follow torch's c10/cuda/CUDACachingAllocator.cpp; its functions are named in
parentheses. Sizes and addresses are in units of MIN_BLOCK_BYTES unless they are called bytes: Python is faster with
small integers.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence

from pipeline.base.units import MIB

MIN_BLOCK_BYTES = 512
"""All sizes are multiples of it (kMinBlockSize in c10/core/AllocatorConfig.h)."""
SMALL_BYTES = MIB
"""The largest request that the small pool serves (kSmallSize, same file)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""The size of a segment, or of a page of an expandable one, in the small pool (kSmallBuffer, same file)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""The same in the large pool (kLargeBuffer, in newer versions the default of large_segment_size)."""
ADDRESS_BITS = 40
"""Addresses of a pool are below 2**ADDRESS_BITS: more than any device has."""
LAST_ADDRESS = (1 << ADDRESS_BITS) - 1

Range = tuple[int, int]
"""The address of a block, and the one behind it."""


class Pool(ABC):
    """The small blocks of one stream, or its large ones."""

    def __init__(self, *, small: bool, reserve: "Reserve") -> None:
        self.segment_size = (SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES) // MIN_BLOCK_BYTES
        self.least_rest = 1
        """The smallest remainder for which a block is split (should_split)."""
        self.free_ends: dict[int, int] = {}
        """Where the free block ends that begins at an address."""
        self.free_begins: dict[int, int] = {}
        """Where the free block begins that ends at an address."""
        self.free_places: list[int] = []
        """Size and, in the lowest ADDRESS_BITS, address of each free block, sorted: as BlockComparatorSize does."""
        self.gaps: dict[int, int] = {}
        """Where the range ends that begins at an address of an expandable segment and has no memory."""
        self._reserve = reserve

    @property
    def free_size(self) -> int:
        """Of all free blocks."""
        return sum(end - begin for begin, end in self.free_ends.items())

    @abstractmethod
    def grow(self, size: int, segment_address: int | None) -> int:
        """Add a free block of at least `size`, and return the size reserved for it on the device."""

    @abstractmethod
    def release(self) -> int:
        """Release unused memory to the device; return its size (release_blocks)."""

    def serve(
        self, events: Iterable[int], sizes: Sequence[int], live: dict[int, Range], segment_address: int | None = None
    ) -> dict[int, int]:
        """Serve requests: n allocates a block of at least sizes[n], -1 - n frees it (alloc_found_block, free_block).

        `live` holds the block of each n. Return the sizes of blocks that are larger than requested. Most of the time of
        a replay is spent here, hence one loop with few calls.
        """
        ends, begins, places = self.free_ends, self.free_begins, self.free_places
        gaps, least_rest = self.gaps, self.least_rest
        larger: dict[int, int] = {}
        for event in events:
            if event >= 0:
                size = sizes[event]
                while (index := bisect_left(places, size << ADDRESS_BITS)) == len(places):
                    self._reserve(self, size, segment_address)
                if gaps:
                    index = self._shortest_reach(index)
                begin = places[index] & LAST_ADDRESS
                end = ends.pop(begin)
                middle = begin + size
                if end - middle < least_rest:
                    del places[index], begins[end]
                    live[event] = begin, end
                    if middle < end:
                        larger[event] = end - begin
                else:
                    live[event] = begin, middle
                    ends[middle] = end
                    begins[end] = middle
                    place = (end - middle << ADDRESS_BITS) + middle
                    if index and place < places[index - 1]:
                        del places[index]
                        insort(places, place, 0, index)
                    else:
                        places[index] = place
            else:
                begin, end = live.pop(-1 - event)
                if end in ends:
                    after = ends.pop(end)
                    del places[bisect_left(places, (after - end << ADDRESS_BITS) + end)]
                    end = after
                if begin in begins:
                    before = begins.pop(begin)
                    del places[bisect_left(places, (begin - before << ADDRESS_BITS) + before)]
                    begin = before
                ends[begin] = end
                begins[end] = begin
                insort(places, (end - begin << ADDRESS_BITS) + begin)
        return larger

    def free(self, block: Range) -> None:
        """Add a block to the free ones."""
        self.serve((-1,), (), {0: block})

    def remove(self, block: Range) -> None:
        """Remove a free block."""
        begin, end = block
        del self.free_ends[begin], self.free_begins[end]
        del self.free_places[bisect_left(self.free_places, (end - begin << ADDRESS_BITS) + begin)]

    def _shortest_reach(self, index: int) -> int:
        """Return the index of the best fit, counting each block together with the unmapped range behind it.

        The next larger block is considered only as long as that is an improvement (get_free_block).
        """
        while index + 1 < len(self.free_places) and self._reach(index + 1) < self._reach(index):
            index += 1
        return index

    def _reach(self, index: int) -> int:
        begin = self.free_places[index] & LAST_ADDRESS
        end = self.free_ends[begin]
        return self.gaps.get(end, end) - begin


Reserve = Callable[[Pool, int, int | None], None]
"""Lets a pool grow for a request of some size, at an address if that is known."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
