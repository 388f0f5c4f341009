"""A simulation of the CUDA caching allocator: the memory that a sequence of allocations reserves, without a GPU.

It follows c10/cuda/CUDACachingAllocator.cpp at torch's default settings, and to `expandable_segments:True`. Left out:
CUDA graphs' private pools, max_split_size, roundup_power2_divisions, garbage_collection_threshold, and a device that
is full below the cap.
"""

from functools import partial

from pipeline.memory.blocks import ADDRESS_SPACE_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, Block, Pool, round_up
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
        self._cap_bytes = cap_bytes
        self._make_pool = ExpandablePool if expandable_segments else partial(SegmentPool, oldest_first=oldest_first)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self.allocated_bytes = 0
        """Rounded sizes of the allocated blocks: torch.cuda.memory_allocated."""
        self.reserved_bytes = 0
        """Taken from the device: torch.cuda.memory_reserved."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        """Number of times that the cap was reached and the cached segments were released."""

    def allocate(self, size_bytes: int, *, stream: int = 0, segment_address: int | None = None) -> Block:
        """Return an allocated block of at least `size_bytes`; a request of 0 bytes takes no memory.

        Blocks are reused within a stream only. `segment_address` is the address of a new segment, if one is needed; it
        decides between free blocks of equal size unless the oldest comes first.

        Raises:
            OutOfMemoryError: the request exceeds the cap.

        """
        rounded_bytes = round_up(size_bytes, MIN_BLOCK_BYTES)  # round_size
        pool = self._pool(stream, small=rounded_bytes <= SMALL_BYTES)
        if size_bytes == 0:
            return Block(pool, pool.base_address, 0, allocated=True)
        block = pool.best_fit(rounded_bytes)
        if block is None:
            self._ensure_below_cap(rounded_bytes)
            block, segment_bytes = pool.grow(rounded_bytes, segment_address)
            self.reserved_bytes += segment_bytes
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        pool.allocate_block(block, rounded_bytes)
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block; its memory stays reserved, for its stream.

        Raises:
            ValueError: the block is not allocated.

        """
        if not block.allocated:
            raise ValueError(f"only an allocated block can be freed, and this one is not: {block}")
        self.allocated_bytes -= block.size_bytes
        if block.size_bytes == 0:
            block.allocated = False
        else:
            block.pool.free_block(block)

    def empty_cache(self) -> None:
        """Release all unused segments to the device: torch.cuda.empty_cache (release_cached_blocks)."""
        self.reserved_bytes -= sum(pool.release() for pool in self._pools.values())

    def _pool(self, stream: int, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            base_address = (len(self._pools) + 1) * ADDRESS_SPACE_BYTES
            pool = self._pools[stream, small] = self._make_pool(small=small, base_address=base_address)
        return pool

    def _ensure_below_cap(self, rounded_bytes: int) -> None:
        """Release the cached segments where the request would exceed the cap (malloc, alloc_block).

        torch compares with the size of a whole segment even where an expandable one needs less, and then maps pages
        without another check: up to a page minus 2 MiB beyond the cap.
        """
        if self._cap_bytes is None or self.reserved_bytes + segment_bytes_for(rounded_bytes) <= self._cap_bytes:
            return
        self.empty_cache()
        self.num_alloc_retries += 1
        if self.reserved_bytes + segment_bytes_for(rounded_bytes) > self._cap_bytes:
            raise OutOfMemoryError(
                requested_bytes=rounded_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
                cap_bytes=self._cap_bytes,
            )
