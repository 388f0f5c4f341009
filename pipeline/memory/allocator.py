"""A simulation of the CUDA caching allocator: the memory that a sequence of allocations reserves, without a GPU.

It follows c10/cuda/CUDACachingAllocator.cpp at torch's default settings, and to `expandable_segments:True`. Left out:
CUDA graphs' private pools, max_split_size, roundup_power2_divisions, garbage_collection_threshold, and a device that
is full below the cap.
"""

from dataclasses import dataclass, field
from functools import partial

from pipeline.memory.blocks import ADDRESS_BITS, MIN_BLOCK_BYTES, SMALL_BYTES, Block, Pool, round_up
from pipeline.memory.segments import OLDEST_FIRST, ExpandablePool, SegmentPool, segment_bytes_for


class OutOfMemoryError(Exception):
    """A request exceeds the cap, even after all cached segments were released."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, cap_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes:,} bytes do not fit: {reserved_bytes:,} of {cap_bytes:,} bytes are reserved, "
            f"{allocated_bytes:,} of them allocated"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.cap_bytes = cap_bytes


@dataclass(slots=True, eq=False)
class Allocation:
    """A block that was allocated."""

    pool: Pool = field(repr=False)
    block: Block
    freed: bool = False

    @property
    def size_bytes(self) -> int:
        """Rounded, as torch.cuda.memory_allocated counts it."""
        return (self.block >> ADDRESS_BITS) * MIN_BLOCK_BYTES


class CachingAllocator:
    """The allocator of one device; its attributes are those of torch.cuda.memory_stats.

    `cap_bytes` is the limit that set_per_process_memory_fraction sets, in bytes. `oldest_first` is the order of equal
    blocks in separate segments, by default that of this version of torch.
    """

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        expandable_segments: bool = False,
        oldest_first: bool = OLDEST_FIRST,
    ) -> None:
        self.cap_bytes = cap_bytes
        self._make_pool = ExpandablePool if expandable_segments else partial(SegmentPool, oldest_first=oldest_first)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self.reserved_bytes = 0
        """Taken from the device: torch.cuda.memory_reserved."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        """Number of times that the cap was reached and the cached segments were released."""

    @property
    def allocated_bytes(self) -> int:
        """Rounded sizes of the allocated blocks: torch.cuda.memory_allocated."""
        return self.reserved_bytes - sum(pool.free_size for pool in self._pools.values()) * MIN_BLOCK_BYTES

    def allocate(self, size_bytes: int, *, stream: int = 0, segment_address: int | None = None) -> Allocation:
        """Return an allocated block of at least `size_bytes`; a request of 0 bytes takes no memory.

        Blocks are reused within a stream only. `segment_address` is the address of a new segment, if one is needed; it
        decides between free blocks of equal size unless the oldest comes first.

        Raises:
            OutOfMemoryError: the request exceeds the cap.

        """
        size = round_up(size_bytes, MIN_BLOCK_BYTES) // MIN_BLOCK_BYTES  # round_size
        pool = self.pool(stream, small=size_bytes <= SMALL_BYTES)
        if size == 0:
            return Allocation(pool, 0)
        live: dict[int, Block] = {}
        pool.serve((0,), (size,), live, segment_address)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Allocation(pool, live[0])

    def free(self, allocation: Allocation) -> None:
        """Free a block; its memory stays reserved, for its stream.

        Raises:
            ValueError: the block is free.

        """
        if allocation.freed:
            raise ValueError(f"only an allocated block can be freed, and this one is free: {allocation}")
        allocation.freed = True
        if allocation.size_bytes > 0:
            allocation.pool.free(allocation.block)

    def empty_cache(self) -> None:
        """Release all unused segments to the device: torch.cuda.empty_cache (release_cached_blocks)."""
        self.reserved_bytes -= sum(pool.release() for pool in self._pools.values()) * MIN_BLOCK_BYTES

    def pool(self, stream: int, *, small: bool) -> Pool:
        """Return the pool of the small or the large blocks of a stream."""
        if (stream, small) not in self._pools:
            self._pools[stream, small] = self._make_pool(small=small, reserve=self._grow)
        return self._pools[stream, small]

    def _grow(self, pool: Pool, size: int, segment_address: int | None) -> None:
        """Let a pool grow, where the cap allows it once the cached segments are released (malloc, alloc_block).

        torch compares with the size of a whole segment even where an expandable one needs less, and then maps pages
        without another check: up to a page minus 2 MiB beyond the cap.
        """
        rounded_bytes = size * MIN_BLOCK_BYTES
        if self.cap_bytes is not None and self.reserved_bytes + segment_bytes_for(rounded_bytes) > self.cap_bytes:
            self.empty_cache()
            self.num_alloc_retries += 1
            if self.reserved_bytes + segment_bytes_for(rounded_bytes) > self.cap_bytes:
                raise OutOfMemoryError(
                    requested_bytes=rounded_bytes,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    cap_bytes=self.cap_bytes,
                )
        self.reserved_bytes += pool.grow(size, segment_address) * MIN_BLOCK_BYTES
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
