"""The CUDA caching allocator, simulated: what a sequence of allocations reserves on a device, without the device.

Faithful to c10/cuda/CUDACachingAllocator.cpp at torch's default settings, and to `expandable_segments:True`. Left out:
CUDA graphs' private pools, max_split_size, roundup_power2_divisions, garbage_collection_threshold, and a device that
is full below the cap.
"""

from pipeline.memory.blocks import ADDRESS_SPACE_BYTES, MIN_BLOCK_BYTES, SMALL_BYTES, Block, Pool, round_up
from pipeline.memory.segments import ExpandablePool, SegmentPool, segment_bytes_for


class OutOfMemoryError(Exception):
    """The cap does not allow a request, not even after everything cached has gone back to the device."""

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
    """The allocator of one device; its figures are those of torch.cuda.memory_stats.

    `cap_bytes` is what set_per_process_memory_fraction allows: the fraction of the device's memory, rounded down.
    """

    def __init__(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self._cap_bytes = cap_bytes
        self._pool_type = ExpandablePool if expandable_segments else SegmentPool
        self._pools: dict[tuple[int, bool], Pool] = {}
        self.allocated_bytes = 0
        """In live blocks, as rounded: torch.cuda.memory_allocated."""
        self.reserved_bytes = 0
        """Taken from the device: torch.cuda.memory_reserved."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        """How often the cap was met, and everything cached given back (counted too where that did not suffice)."""

    def allocate(self, size_bytes: int, *, stream: int = 0, segment_address: int | None = None) -> Block:
        """Return a live block of at least `size_bytes`; a request of 0 bytes takes no memory.

        Blocks are reused within a stream only. `segment_address` says where the device would put a new segment; it
        decides between free blocks of one size.

        Raises:
            OutOfMemoryError: the cap does not allow it.

        """
        rounded_bytes = round_up(size_bytes, MIN_BLOCK_BYTES)  # round_size
        pool = self._pool(stream, small=rounded_bytes <= SMALL_BYTES)
        if size_bytes == 0:
            return Block(pool, pool.base_address, 0, allocated=True)
        block = pool.best_fit(rounded_bytes)
        if block is None:
            self._make_room(rounded_bytes)
            block, segment_bytes = pool.grow(rounded_bytes, segment_address)
            self.reserved_bytes += segment_bytes
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        pool.hand_out(block, rounded_bytes)
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Make a live block's memory available to its stream again; it stays reserved.

        Raises:
            ValueError: the block is not live.

        """
        if not block.allocated:
            raise ValueError(f"only a live block can be freed, and this one is not: {block}")
        self.allocated_bytes -= block.size_bytes
        if block.size_bytes == 0:
            block.allocated = False
        else:
            block.pool.put_back(block)

    def empty_cache(self) -> None:
        """Give everything back to the device that can go: torch.cuda.empty_cache (release_cached_blocks)."""
        self.reserved_bytes -= sum(pool.release() for pool in self._pools.values())

    def _pool(self, stream: int, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            base_address = (len(self._pools) + 1) * ADDRESS_SPACE_BYTES
            pool = self._pools[stream, small] = self._pool_type(small=small, base_address=base_address)
        return pool

    def _make_room(self, rounded_bytes: int) -> None:
        """Release and retry at the cap: malloc, alloc_block.

        torch compares with the size of a whole segment even where an expandable one would need less, and then maps
        pages without looking again: up to a page less 2 MiB beyond the cap.
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
