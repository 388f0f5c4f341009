"""The two kinds of pools: separate segments (cudaMalloc), or one expandable segment that grows by pages."""

from pipeline.base.torch_version import TORCH_VERSION
from pipeline.base.units import MIB
from pipeline.memory.blocks import (
    ADDRESS_BITS,
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
    Reserve,
    begin_and_end,
    block_between,
    round_up,
)

MIN_LARGE_BYTES = 10 * MIB
"""Requests of at least this size get a segment of their own (kMinLargeAlloc in c10/core/AllocatorConfig.h)."""
ROUND_LARGE_BYTES = 2 * MIB
"""The size of such a segment is a multiple of it (kRoundLarge, same file)."""
OLDEST_FIRST = TORCH_VERSION >= (2, 12)
"""Whether of free blocks of equal size the one in the oldest segment is taken; before, the one at the lowest address.

The former is BlockComparatorSizeCounterAddress of torch 2.13 and later (in 2.12 the oldest block), the latter
BlockComparatorSize.
"""


def segment_bytes_for(size_bytes: int) -> int:
    """Return the size of a new segment for a rounded request (get_allocation_size)."""
    if size_bytes >= MIN_LARGE_BYTES:
        return round_up(size_bytes, ROUND_LARGE_BYTES)
    return SMALL_SEGMENT_BYTES if size_bytes <= SMALL_BYTES else LARGE_SEGMENT_BYTES


class SegmentPool(Pool):
    """Segments from cudaMalloc, the default; a segment can be released when all of it is free."""

    def __init__(self, *, small: bool, reserve: Reserve, oldest_first: bool) -> None:
        super().__init__(small=small, reserve=reserve)
        self._oldest_first = oldest_first
        self._segments: set[Block] = set()
        self._sum_of_sizes = 0
        if not small:  # max_split_size is unlimited by default: no block is too large to split
            self.least_rest = SMALL_BYTES // MIN_BLOCK_BYTES + 1

    def grow(self, size: int, segment_address: int | None) -> int:
        """Add a new segment (alloc_block).

        It lies above all others where the oldest segment comes first, so that addresses are in that order; else it lies
        at its real address, by default below all others: CUDA gives descending addresses (benchmarks/published). All
        addresses are doubled, so that the blocks of two segments are never neighbours.
        """
        segment_size = segment_bytes_for(size * MIN_BLOCK_BYTES) // MIN_BLOCK_BYTES
        begin = 2 * self._sum_of_sizes
        self._sum_of_sizes += segment_size
        if not self._oldest_first:
            below = 2**ADDRESS_BITS - 2 * self._sum_of_sizes
            begin = below if segment_address is None else 2 * segment_address // MIN_BLOCK_BYTES
        segment = block_between(begin, begin + segment_size)
        self._segments.add(segment)
        self.free(segment)
        return segment_size

    def release(self) -> int:
        """Release the segments without an allocated block."""
        unused = self._segments.intersection(self.free_blocks)
        self._segments -= unused
        for segment in unused:
            self.remove(segment)
        return sum(segment >> ADDRESS_BITS for segment in unused)


class ExpandablePool(Pool):
    """One segment of addresses, whose pages are mapped where they are needed (expandable_segments:True)."""

    def __init__(self, *, small: bool, reserve: Reserve) -> None:
        super().__init__(small=small, reserve=reserve)
        self.gaps[0] = 2**ADDRESS_BITS

    def grow(self, size: int, segment_address: int | None) -> int:
        """Map pages at the lowest sufficient address range (try_allocate_expandable_block)."""
        return sum(self._map(begin, part_size) for begin, part_size in self._lowest_gaps(size))

    def release(self) -> int:
        """Unmap the whole pages of every free block; its partial pages stay free (unmap_block)."""
        return sum(self._unmap(block) for block in self.free_blocks.copy())

    def _lowest_gaps(self, size: int) -> list[tuple[int, int]]:
        """Return addresses and sizes that are unmapped in the first unallocated `size` (find_expandable_block)."""
        for gap in sorted(self.gaps):
            before = self.free_by_end.get(gap)
            begin = end = gap if before is None else gap - (before >> ADDRESS_BITS)
            found = []
            while end - begin < size and (end in self.gaps or end in self.free_by_begin):
                if end in self.gaps:
                    found.append((end, min(self.gaps[end], begin + size) - end))
                    end = self.gaps[end]
                else:
                    end += self.free_by_begin[end] >> ADDRESS_BITS
            if end - begin >= size:
                return found
        raise AssertionError("the address range of a pool is larger than any device")

    def _map(self, begin: int, size: int) -> int:
        """Map the first pages of a gap, and return their size (map_block)."""
        mapped_size = round_up(size, self.segment_size)
        mapped_end, end = begin + mapped_size, self.gaps.pop(begin)
        if mapped_end < end:
            self.gaps[mapped_end] = end
        self.free(block_between(begin, mapped_end))
        return mapped_size

    def _unmap(self, block: Block) -> int:
        begin, end = begin_and_end(block)
        first = round_up(begin, self.segment_size)
        last = end // self.segment_size * self.segment_size
        if first >= last:
            return 0
        self.remove(block)
        if begin < first:
            self.free(block_between(begin, first))
        if last < end:
            self.free(block_between(last, end))
        before = next((gap for gap, gap_end in self.gaps.items() if gap_end == first), first)
        self.gaps[before] = self.gaps.pop(last, last)
        return last - first
