"""The two kinds of pools: separate segments (cudaMalloc), or one expandable segment that grows by pages."""

from bisect import bisect_left

from pipeline.base.torch_version import TORCH_VERSION
from pipeline.base.units import MIB
from pipeline.memory.blocks import (
    ADDRESS_SPACE_BYTES,
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    Pool,
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

    def __init__(self, *, small: bool, base_address: int, oldest_first: bool) -> None:
        super().__init__(small=small, base_address=base_address)
        self._oldest_first = oldest_first
        self._reserved_address_bytes = 0
        if not small:
            self.unsplit_bytes = SMALL_BYTES  # max_split_size is unlimited by default: no block is too large to split

    def best_fit(self, size_bytes: int) -> Block | None:
        """Remove and return the smallest free block, of equal ones that at the lowest address (get_free_block)."""
        index = bisect_left(self.free, (size_bytes,))
        return self.free.pop(index)[2] if index < len(self.free) else None

    def grow(self, size_bytes: int, segment_address: int | None) -> tuple[Block, int]:
        """Return a new segment as one block (alloc_block).

        It lies above all others where the oldest segment comes first, so that addresses are in that order; else it lies
        at its real address, by default below all others: CUDA gives descending addresses (benchmarks/published).
        """
        segment_bytes = segment_bytes_for(size_bytes)
        above = self.base_address + self._reserved_address_bytes
        self._reserved_address_bytes += segment_bytes
        below = self.base_address + ADDRESS_SPACE_BYTES - self._reserved_address_bytes
        address = above if self._oldest_first else below if segment_address is None else segment_address
        return Block(self, address, segment_bytes), segment_bytes

    def release(self) -> int:
        """Release the segments without an allocated block: those whose free block has no neighbour."""
        kept = [entry for entry in self.free if entry[2].previous or entry[2].next]
        released_bytes = sum(entry[0] for entry in self.free) - sum(entry[0] for entry in kept)
        self.free = kept
        return released_bytes


class ExpandablePool(Pool):
    """One segment of addresses, whose pages are mapped where they are needed (expandable_segments:True)."""

    def __init__(self, *, small: bool, base_address: int) -> None:
        super().__init__(small=small, base_address=base_address)
        self.unmapped.append(Block(self, base_address, ADDRESS_SPACE_BYTES, mapped=False))

    def best_fit(self, size_bytes: int) -> Block | None:
        """Remove and return the smallest free block, counting each block together with the unmapped block behind it.

        The next larger block is considered only as long as that is an improvement (get_free_block).
        """
        index = bisect_left(self.free, (size_bytes,))
        if index == len(self.free):
            return None
        while index + 1 < len(self.free) and _reach(self.free[index + 1][2]) < _reach(self.free[index][2]):
            index += 1
        return self.free.pop(index)[2]

    def grow(self, size_bytes: int, segment_address: int | None) -> tuple[Block, int]:
        """Map pages at the lowest sufficient address range (try_allocate_expandable_block)."""
        block = self._lowest_range(size_bytes)
        mapped_bytes = 0 if block.mapped else self._map(block, min(block.size_bytes, size_bytes))
        while block.size_bytes < size_bytes:
            gap = block.next
            assert gap is not None  # _lowest_range() has found enough
            mapped_bytes += self._map(gap, min(gap.size_bytes, size_bytes - block.size_bytes))
            block = gap  # merged with the block before it
        self.remove(block)
        return block, mapped_bytes

    def release(self) -> int:
        """Unmap the whole pages of every free block; its partial pages stay free (unmap_block)."""
        return sum(self._unmap(block) for _, _, block in list(self.free))

    def _lowest_range(self, size_bytes: int) -> Block:
        """Return the first of adjacent unallocated blocks with `size_bytes` in all (find_expandable_block)."""
        for gap in sorted(self.unmapped, key=lambda block: block.address):
            first = gap if gap.previous is None or gap.previous.allocated else gap.previous
            range_bytes = 0
            block: Block | None = first
            while range_bytes < size_bytes and block is not None and not block.allocated:
                range_bytes, block = range_bytes + block.size_bytes, block.next
            if range_bytes >= size_bytes:
                return first
        raise AssertionError("the address range of a pool is larger than any device")

    def _map(self, gap: Block, size_bytes: int) -> int:
        """Map the first pages of an unmapped block, merge them with free neighbours, return their bytes (map_block)."""
        mapped_bytes = round_up(size_bytes, self.segment_bytes)
        self.remove(gap)
        if mapped_bytes < gap.size_bytes:
            self.unmapped.append(self.split(gap, mapped_bytes))
        gap.mapped = True
        self.merge(gap)
        self.add(gap)
        return mapped_bytes

    def _unmap(self, block: Block) -> int:
        start = round_up(block.address, self.segment_bytes)
        end = (block.address + block.size_bytes) // self.segment_bytes * self.segment_bytes
        if start >= end:
            return 0
        self.remove(block)
        if block.address < start:
            before, block = block, self.split(block, start - block.address)
            self.add(before)
        if block.size_bytes > end - start:
            self.add(self.split(block, end - start))
        block.mapped = False
        self.merge(block)
        self.unmapped.append(block)
        return end - start


def _reach(block: Block) -> int:
    after = block.next
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)
