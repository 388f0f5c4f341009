"""Blocks of device memory, and a pool of free ones in best-fit order: what both kinds of segments have in common.

Facts here, in segments.py and in allocator.py are those of torch's c10/cuda/CUDACachingAllocator.cpp; the functions
that they come from are named in brackets.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pipeline.base.units import MIB

MIN_BLOCK_BYTES = 512
"""Every size is a multiple of it (kMinBlockSize in c10/core/AllocatorConfig.h)."""
SMALL_BYTES = MIB
"""The largest request that is served from the small pool (kSmallSize, same file)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""The size of a segment, or of a page of an expandable one, in the small pool (kSmallBuffer, same file)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""The same in the large pool (kLargeBuffer, in newer versions the default of large_segment_size)."""
ADDRESS_SPACE_BYTES = LARGE_SEGMENT_BYTES * 2**40
"""Addresses of one pool: more than any device has, and a multiple of every page size. Real addresses are below it."""


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses within one segment: allocated, free, or (in an expandable segment) without memory yet."""

    pool: "Pool" = field(repr=False)
    address: int
    size_bytes: int
    """Rounded: what torch.cuda.memory_allocated counts."""
    allocated: bool = False
    mapped: bool = True
    """Whether there is memory behind the addresses."""
    previous: "Block | None" = field(default=None, repr=False)
    """The neighbour at lower addresses of the same segment."""
    next: "Block | None" = field(default=None, repr=False)


class Pool(ABC):
    """The blocks of one stream that are small, or those that are large."""

    def __init__(self, *, small: bool, base_address: int) -> None:
        self.segment_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.base_address = base_address
        self.unsplit_bytes = MIN_BLOCK_BYTES - 1
        """How much larger than its request a block may be without being split (should_split)."""
        self.free: list[tuple[int, int, Block]] = []
        """(size, address, block), sorted: the order of BlockComparatorSize."""
        self.unmapped: list[Block] = []

    @abstractmethod
    def best_fit(self, size_bytes: int) -> Block | None:
        """Take out of the free blocks the one that suits `size_bytes` best; None where none is large enough."""

    @abstractmethod
    def grow(self, size_bytes: int, segment_address: int | None) -> tuple[Block, int]:
        """Return a block of at least `size_bytes`, and the bytes that had to be taken from the device for it."""

    @abstractmethod
    def release(self) -> int:
        """Give back to the device what is wholly free; return its bytes (release_blocks)."""

    def hand_out(self, block: Block, size_bytes: int) -> None:
        """Make a block live that is in no list, after splitting off what it is too large by (alloc_found_block)."""
        if block.size_bytes - size_bytes > self.unsplit_bytes:
            self.keep(self.split(block, size_bytes))
        block.allocated = True

    def put_back(self, block: Block) -> None:
        """Make an allocated block free, one with its free neighbours (free_block)."""
        block.allocated = False
        self.merge(block)
        self.keep(block)

    def keep(self, block: Block) -> None:
        """Add a block to the free ones."""
        insort(self.free, (block.size_bytes, block.address, block))

    def drop(self, block: Block) -> None:
        """Take a block out of the list it is in."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size_bytes, block.address))]
        else:
            self.unmapped.remove(block)

    def split(self, block: Block, size_bytes: int) -> Block:
        """Shorten a block to its first `size_bytes`, and return the rest as its new neighbour, which is in no list."""
        rest = Block(self, block.address + size_bytes, block.size_bytes - size_bytes, mapped=block.mapped)
        block.size_bytes = size_bytes
        _link(rest, block.next)
        _link(block, rest)
        return rest

    def merge(self, block: Block) -> None:
        """Let a block that is in no list swallow its neighbours that are free like it (try_merge_blocks)."""
        before, after = block.previous, block.next
        if before is not None and not before.allocated and before.mapped == block.mapped:
            self.drop(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            _link(before.previous, block)
        if after is not None and not after.allocated and after.mapped == block.mapped:
            self.drop(after)
            block.size_bytes += after.size_bytes
            _link(block, after.next)


def round_up(size_bytes: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than `size_bytes`."""
    return -(-size_bytes // multiple) * multiple


def _link(before: Block | None, after: Block | None) -> None:
    if before is not None:
        before.next = after
    if after is not None:
        after.previous = before
