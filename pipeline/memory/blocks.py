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

Block = int
"""A size and, in the lowest ADDRESS_BITS, an address: blocks are in the order of BlockComparatorSize."""


def block_between(begin: int, end: int) -> Block:
    """Return the block that begins at an address and ends before another."""
    return (end - begin << ADDRESS_BITS) + begin


def begin_and_end(block: Block) -> tuple[int, int]:
    """Return the address of a block, and the one behind it."""
    begin = block & LAST_ADDRESS
    return begin, begin + (block >> ADDRESS_BITS)


class Pool(ABC):
    """The small blocks of one stream, or its large ones."""

    def __init__(self, *, small: bool, reserve: "Reserve") -> None:
        self.segment_size = (SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES) // MIN_BLOCK_BYTES
        self.least_rest = 1
        """The smallest remainder for which a block is split (should_split)."""
        self.free_blocks: list[Block] = []
        """In order."""
        self.free_by_begin: dict[int, Block] = {}
        """By their address."""
        self.free_by_end: dict[int, Block] = {}
        """By the address behind them."""
        self.gaps: dict[int, int] = {}
        """Where the range ends that begins at an address of an expandable segment and has no memory."""
        self._reserve = reserve

    @property
    def free_size(self) -> int:
        """Of all free blocks."""
        return sum(block >> ADDRESS_BITS for block in self.free_blocks)

    @abstractmethod
    def grow(self, size: int, segment_address: int | None) -> int:
        """Add a free block of at least `size`, and return the size reserved for it on the device."""

    @abstractmethod
    def release(self) -> int:
        """Release unused memory to the device; return its size (release_blocks)."""

    def serve(
        self, events: Iterable[int], sizes: Sequence[int], live: dict[int, Block], segment_address: int | None = None
    ) -> dict[int, int]:
        """Serve requests: n allocates a block of at least sizes[n], -1 - n frees it (alloc_found_block, free_block).

        `live` holds the block of each n. Return the sizes of blocks that are larger than requested. Most of the time of
        a replay is spent here, hence one loop with few calls.
        """
        by_begin, by_end, blocks = self.free_by_begin, self.free_by_end, self.free_blocks
        gaps, least_rest = self.gaps, self.least_rest << ADDRESS_BITS
        larger: dict[int, int] = {}
        for event in events:
            if event >= 0:
                size = sizes[event]
                wanted = size << ADDRESS_BITS
                while (index := bisect_left(blocks, wanted)) == len(blocks):
                    self._reserve(self, size, segment_address)
                block = blocks[index]
                begin = block & LAST_ADDRESS
                end = begin + (block >> ADDRESS_BITS)
                if end in gaps:
                    index = self._shortest_reach(index)
                    block = blocks[index]
                    begin, end = begin_and_end(block)
                rest = block - wanted
                del by_begin[begin]
                if rest < least_rest:
                    del blocks[index], by_end[end]
                    live[event] = block
                    if rest > begin:
                        larger[event] = end - begin
                else:
                    live[event] = wanted + begin
                    rest += size
                    by_begin[begin + size] = by_end[end] = rest
                    if index and rest < blocks[index - 1]:
                        del blocks[index]
                        insort(blocks, rest, 0, index)
                    else:
                        blocks[index] = rest
            else:
                block = live.pop(-1 - event)
                begin = block & LAST_ADDRESS
                end = begin + (block >> ADDRESS_BITS)
                if end in by_begin:
                    after = by_begin.pop(end)
                    del blocks[bisect_left(blocks, after)]
                    block += after - end
                    end += after >> ADDRESS_BITS
                if begin in by_end:
                    before = by_end.pop(begin)
                    del blocks[bisect_left(blocks, before)]
                    block += before - begin
                    begin = before & LAST_ADDRESS
                by_begin[begin] = by_end[end] = block
                insort(blocks, block)
        return larger

    def free(self, block: Block) -> None:
        """Add a block to the free ones."""
        self.serve((-1,), (), {0: block})

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        begin, end = begin_and_end(block)
        del self.free_by_begin[begin], self.free_by_end[end], self.free_blocks[bisect_left(self.free_blocks, block)]

    def _shortest_reach(self, index: int) -> int:
        """Return the index of the best fit, counting each block together with the unmapped range behind it.

        The next larger block is considered only as long as that is an improvement (get_free_block).
        """
        blocks = self.free_blocks
        while index + 1 < len(blocks) and self._reach(blocks[index + 1]) < self._reach(blocks[index]):
            index += 1
        return index

    def _reach(self, block: Block) -> int:
        begin, end = begin_and_end(block)
        return self.gaps.get(end, end) - begin


Reserve = Callable[[Pool, int, int | None], None]
"""Lets a pool grow for a request of some size, at an address if that is known."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
