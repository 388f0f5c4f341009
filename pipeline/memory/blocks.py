"""Blocks of device memory, and pools of free blocks in best-fit order: the base of both kinds of segments.

This file, segments.py and allocator.py follow torch's c10/cuda/CUDACachingAllocator.cpp; its functions are named in
parentheses.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pipeline.base.units import MIB

MIN_BLOCK_BYTES = 512
"""All sizes are multiples of it (kMinBlockSize in c10/core/AllocatorConfig.h)."""
SMALL_BYTES = MIB
"""The largest request that the small pool serves (kSmallSize, same file)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""The size of a segment, or of a page of an expandable one, in the small pool (kSmallBuffer, same file)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""The same in the large pool (kLargeBuffer, in newer versions the default of large_segment_size)."""
ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES * 2**40
"""Address range of one pool: larger than any device, and a multiple of every page size."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses within one segment: allocated, free, or (in an expandable segment) not mapped."""

    pool: "Pool" = field(repr=False)
    address: int
    size_bytes: int
    """Rounded, as torch.cuda.memory_allocated counts it."""
    allocated: bool = False
    mapped: bool = True
    """Whether the addresses are backed by memory."""
    previous: "Block | None" = field(default=None, repr=False)
    """The neighbour at lower addresses in the same segment."""
    next: "Block | None" = field(default=None, repr=False)


class Pool(ABC):
    """The small blocks of one stream, or its large ones."""

    def __init__(self, *, small: bool, base_address: int) -> None:
        self.segment_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.base_address = base_address
        self.unsplit_bytes = MIN_BLOCK_BYTES - 1
        """The largest remainder with which a block is not split (should_split)."""
        self.free: list[tuple[int, int, Block]] = []
        """(size, address, block), sorted: the order of BlockComparatorSize."""
        self.unmapped: list[Block] = []

    @abstractmethod
    def best_fit(self, size_bytes: int) -> Block | None:
        """Remove the best-fitting free block from the pool and return it; None if none is large enough."""

    @abstractmethod
    def grow(self, size_bytes: int, segment_address: int | None) -> tuple[Block, int]:
        """Return a new block of at least `size_bytes`, and the bytes reserved for it on the device."""

    @abstractmethod
    def release(self) -> int:
        """Release unused memory to the device; return its bytes (release_blocks)."""

    def allocate_block(self, block: Block, size_bytes: int) -> None:
        """Mark a block that is in no list as allocated, and split off its remainder (alloc_found_block)."""
        if block.size_bytes - size_bytes > self.unsplit_bytes:
            self.add(self.split(block, size_bytes))
        block.allocated = True

    def free_block(self, block: Block) -> None:
        """Mark an allocated block as free, and merge it with its free neighbours (free_block)."""
        block.allocated = False
        self.merge(block)
        self.add(block)

    def add(self, block: Block) -> None:
        """Add a block to the free blocks."""
        insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block from its list."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            self.unmapped.remove(block)

    def split(self, block: Block, size_bytes: int) -> Block:
        """Shorten a block to its first `size_bytes`, and return the remainder, which is in no list."""
        rest = Block(self, block.address + size_bytes, block.size_bytes - size_bytes, mapped=block.mapped)
        block.size_bytes = size_bytes
        _link(rest, block.next)
        _link(block, rest)
        return rest

    def merge(self, block: Block) -> None:
        """Merge a block that is in no list with its free neighbours (try_merge_blocks)."""
        before, after = block.previous, block.next
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self.remove(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            _link(before.previous, block)
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self.remove(after)
            block.size_bytes += after.size_bytes
            _link(block, after.next)


def round_up(size_bytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size_bytes`."""
    return -(-size_bytes // multiple) * multiple


def _link(before: Block | None, after: Block | None) -> None:
    if before is not None:
        before.next = after
    if after is not None:
        after.previous = before
