"""The simulated CUDA caching allocator: each rule in an example, and invariants on random programs."""

import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from recordings import Allocation, EmptyCache, Event, Free, replay

from pipeline.base.units import MIB
from pipeline.memory.allocator import Allocation as Allocated
from pipeline.memory.allocator import CachingAllocator, OutOfMemoryError
from pipeline.memory.blocks import (
    ADDRESS_BITS,
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    begin_and_end,
)
from pipeline.memory.segments import MIN_LARGE_BYTES, ROUND_LARGE_BYTES

BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["default", "expandable"])


def ends(allocation: Allocated) -> tuple[int, int]:
    """Return the address of an allocated block, and the one behind it."""
    return begin_and_end(allocation.block)


def free_bytes_behind(allocation: Allocated) -> int:
    """Return the bytes of the free block that begins where a block ends."""
    return (allocation.pool.free_by_begin.get(ends(allocation)[1], 0) >> ADDRESS_BITS) * MIN_BLOCK_BYTES


def free_bytes_before(allocation: Allocated) -> int:
    """Return the bytes of the free block that ends where a block begins."""
    return (allocation.pool.free_by_end.get(ends(allocation)[0], 0) >> ADDRESS_BITS) * MIN_BLOCK_BYTES


def test_the_constants_are_those_of_the_installed_torch() -> None:
    text = (Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h").read_text()
    theirs = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    if "kMinBlockSize" not in theirs:
        pytest.skip("this version has them in its source alone")
    assert theirs == {
        "kMinBlockSize": MIN_BLOCK_BYTES,
        "kSmallSize": SMALL_BYTES,
        "kSmallBuffer": SMALL_SEGMENT_BYTES,
        "kMinLargeAlloc": MIN_LARGE_BYTES,
        "kRoundLarge": ROUND_LARGE_BYTES,
    }
    assert re.findall(r"large_segment_size_\{(\d+)\}", text) == [str(LARGE_SEGMENT_BYTES)]


@pytest.mark.parametrize(
    ("size", "allocated", "reserved", "reserved_expandable"),
    [
        (1, 512, 2 * MIB, 2 * MIB),
        (512, 512, 2 * MIB, 2 * MIB),
        (513, 1024, 2 * MIB, 2 * MIB),
        (MIB, MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, 20 * MIB),
        # From 10 MiB on a segment of its own, rounded to 2 MiB; what is left of it, at most 1 MiB, is not split off.
        (10 * MIB, 10 * MIB, 10 * MIB, 20 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB, 20 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB, 40 * MIB),
    ],
)
def test_a_first_request_is_rounded_and_takes_a_segment(
    size: int, allocated: int, reserved: int, reserved_expandable: int
) -> None:
    default, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    assert default.allocate(size).size_bytes == default.allocated_bytes == allocated
    assert default.reserved_bytes == reserved
    expandable.allocate(size)
    # The rest of an expandable segment is always split off.
    assert expandable.allocated_bytes == -(-size // 512) * 512
    assert expandable.reserved_bytes == reserved_expandable


@BOTH
def test_a_request_of_no_bytes_takes_no_memory(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    block = allocator.allocate(0)
    allocator.free(block)
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 0


@BOTH
def test_small_and_large_requests_do_not_share_segments(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.allocate(MIB)
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 2 * MIB + 20 * MIB
    allocator.allocate(MIB)  # the rest of the small segment
    allocator.allocate(18 * MIB)  # the rest of the large one
    assert allocator.reserved_bytes == 2 * MIB + 20 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 2 * MIB + 20 * MIB + 2 * MIB


@BOTH
def test_streams_do_not_share_segments(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.free(allocator.allocate(MIB, stream=0))
    allocator.allocate(MIB, stream=1)
    assert allocator.reserved_bytes == 4 * MIB
    allocator.allocate(MIB, stream=0)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_is_split_when_more_than_one_mib_is_left() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(12 * MIB)
    allocator.free(whole)
    tight = allocator.allocate(11 * MIB)
    assert (tight.size_bytes, free_bytes_behind(tight)) == (12 * MIB, 0)
    allocator.free(tight)
    loose = allocator.allocate(11 * MIB - 512)
    assert loose.size_bytes == 11 * MIB - 512
    assert free_bytes_behind(loose) == MIB + 512
    assert allocator.reserved_bytes == 12 * MIB


def test_a_small_block_is_split_when_512_bytes_are_left() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(MIB)
    second = allocator.allocate(MIB - 512)
    assert ends(first)[1] == ends(second)[0] and free_bytes_behind(second) == 512
    last = allocator.allocate(512)
    assert ends(last)[0] == ends(second)[1] and free_bytes_behind(last) == 0
    assert allocator.allocated_bytes == allocator.reserved_bytes == 2 * MIB


@pytest.mark.parametrize("oldest_first", [True, False])
def test_the_best_fit_is_the_smallest_block_then_the_oldest_or_lowest(oldest_first: bool) -> None:
    allocator = CachingAllocator(oldest_first=oldest_first)
    thirty, twelve, fourteen, twin = (allocator.allocate(size * MIB) for size in (30, 12, 14, 12))
    for block in (thirty, twin, fourteen, twelve):
        allocator.free(block)
    twins = (twelve, twin) if oldest_first else (twin, twelve)  # a later segment lies lower
    blocks = [allocation.block for allocation in (*twins, fourteen, thirty)]
    assert [ends(allocator.allocate(12 * MIB))[0] for _ in range(4)] == [begin_and_end(block)[0] for block in blocks]
    assert allocator.reserved_bytes == (30 + 12 + 14 + 12) * MIB


def test_the_address_of_a_new_segment_decides_between_equals() -> None:
    allocator = CachingAllocator(oldest_first=False)
    high = allocator.allocate(12 * MIB, segment_address=2**40)
    low = allocator.allocate(12 * MIB, segment_address=2**30)
    allocator.free(high)
    allocator.free(low)
    assert allocator.allocate(12 * MIB).block == low.block < high.block


@BOTH
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_are_merged(expandable: bool, order: tuple[int, ...]) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index])
    assert allocator.allocated_bytes == 0
    assert allocator.allocate(20 * MIB).size_bytes == allocator.reserved_bytes == 20 * MIB


def test_blocks_of_two_segments_are_not_merged() -> None:
    allocator = CachingAllocator()
    for block in [allocator.allocate(12 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == (12 + 12 + 24) * MIB


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="only an allocated block can be freed"):
        allocator.free(block)


def test_at_the_cap_whole_free_segments_are_released_and_the_request_is_retried() -> None:
    allocator = CachingAllocator(cap_bytes=64 * MIB)
    kept = allocator.allocate(2 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.free(allocator.allocate(1))
    assert allocator.reserved_bytes == (20 + 30 + 2) * MIB
    allocator.allocate(40 * MIB)  # 52 + 40 > 64: the 30 and the 2 go, the 20 has an allocated block in it
    assert allocator.reserved_bytes == (20 + 40) * MIB
    assert allocator.peak_reserved_bytes == (20 + 40) * MIB
    assert allocator.allocated_bytes == (2 + 40) * MIB
    assert allocator.num_alloc_retries == 1
    assert not kept.freed


def test_at_the_cap_a_split_segment_is_kept_and_the_request_fails() -> None:
    allocator = CachingAllocator(cap_bytes=64 * MIB)
    head, tail = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(head)
    allocator.allocate(2 * MIB)  # splits the first 30
    allocator.free(tail)
    with pytest.raises(OutOfMemoryError) as caught:  # 30 + 40 > 64, though 28 + 30 are free
        allocator.allocate(40 * MIB)
    assert caught.value.requested_bytes == 40 * MIB
    assert caught.value.reserved_bytes == allocator.reserved_bytes == 30 * MIB
    assert caught.value.allocated_bytes == allocator.allocated_bytes == 2 * MIB
    assert caught.value.cap_bytes == 64 * MIB
    assert allocator.num_alloc_retries == 1
    allocator.allocate(34 * MIB)  # 30 + 34 = 64
    assert allocator.peak_reserved_bytes == 64 * MIB


def test_a_fitting_cached_block_is_used_at_the_cap_without_a_retry() -> None:
    allocator = CachingAllocator(cap_bytes=30 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(30 * MIB)
    assert allocator.num_alloc_retries == 0


def test_a_cap_one_byte_short_is_a_cap() -> None:
    CachingAllocator(cap_bytes=30 * MIB).allocate(30 * MIB)
    with pytest.raises(OutOfMemoryError):
        CachingAllocator(cap_bytes=30 * MIB - 1).allocate(30 * MIB)


def test_empty_cache_releases_segments_without_allocated_blocks() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 50 * MIB)


def test_an_expandable_segment_grows_by_what_its_free_end_is_short_of() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(10 * MIB)  # one page of 20 MiB, 10 free
    grown = allocator.allocate(25 * MIB)  # 15 more: one page
    assert allocator.reserved_bytes == 40 * MIB
    assert free_bytes_behind(grown) == (40 - 35) * MIB
    default = CachingAllocator()
    default.allocate(10 * MIB)
    default.allocate(25 * MIB)
    assert default.reserved_bytes == (10 + 26) * MIB


def test_the_end_of_an_expandable_segment_is_the_last_choice() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    hole, _, _ = (allocator.allocate(size * MIB) for size in (16, 10, 4))
    allocator.free(hole)  # 16 free at the start, 40 - 30 = 10 at the end
    assert ends(allocator.allocate(8 * MIB))[0] == ends(hole)[0]
    assert ends(allocator.allocate(9 * MIB))[0] > ends(hole)[1]  # 8 are left of the hole: now the end
    assert allocator.reserved_bytes == 40 * MIB


def test_a_gap_is_filled_before_the_end_grows() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(blocks[1])
    allocator.empty_cache()  # the middle page is unmapped
    assert allocator.reserved_bytes == 40 * MIB
    again = allocator.allocate(20 * MIB)  # the lowest room, not the end
    assert again.block == blocks[1].block
    assert allocator.reserved_bytes == 60 * MIB


def test_only_whole_free_pages_of_an_expandable_segment_are_unmapped() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    blocks = [allocator.allocate(size * MIB) for size in (15, 50, 15)]
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(blocks[1])  # 15 to 65: the pages 20 to 40 and 40 to 60 are free
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert free_bytes_behind(blocks[0]) == free_bytes_before(blocks[2]) == 5 * MIB
    # Two of 5: the lower one counts as 45, since the gap behind it could be mapped.
    assert ends(allocator.allocate(5 * MIB))[0] == 60 * MIB // MIN_BLOCK_BYTES
    assert ends(allocator.allocate(44 * MIB))[0] == ends(blocks[0])[1]
    assert allocator.reserved_bytes == 80 * MIB
    assert allocator.allocated_bytes == (15 + 15 + 5 + 44) * MIB


def test_at_the_cap_an_expandable_segment_moves_its_pages() -> None:
    allocator = CachingAllocator(cap_bytes=80 * MIB, expandable_segments=True)
    first, _ = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.allocate(60 * MIB)  # 60 + 60 > 80: two pages go from the start, three come at the end
    assert allocator.reserved_bytes == allocator.allocated_bytes == 80 * MIB
    assert allocator.num_alloc_retries == 1
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(2 * MIB)
    assert allocator.num_alloc_retries == 2


def test_the_cap_is_compared_with_a_whole_segment_even_where_less_is_lacking() -> None:
    allocator = CachingAllocator(cap_bytes=40 * MIB, expandable_segments=True)
    allocator.allocate(10 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(24 * MIB)  # 10 are free, 20 would be mapped, but 20 + 24 > 40
    allocator.allocate(20 * MIB)


def test_pages_may_go_beyond_the_cap() -> None:
    allocator = CachingAllocator(cap_bytes=22 * MIB, expandable_segments=True)
    allocator.allocate(21 * MIB)  # compared as 22, mapped as two pages
    assert allocator.reserved_bytes == 40 * MIB


SIZES = st.one_of(
    st.integers(1, 4 * MIN_BLOCK_BYTES),
    st.integers(1, 2 * MIB),
    st.integers(1, 50).map(lambda size: size * MIB),
    st.integers(MIB, 50 * MIB),
)


class AllocatorMachine(RuleBasedStateMachine):
    """Allocations of a random program; the invariants are checked after each."""

    live = Bundle("live")
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator(**self.options)
        self.blocks: dict[Allocated, int] = {}

    @rule(target=live, size=SIZES, stream=st.sampled_from([0, 0, 0, 1]))
    def allocate(self, size: int, stream: int) -> Any:
        before, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
        try:
            block = self.allocator.allocate(size, stream=stream)
        except OutOfMemoryError as error:
            assert error.requested_bytes == -(-size // 512) * 512
            assert self.allocator.reserved_bytes <= reserved
            assert self.allocator.allocated_bytes == before
            return None
        assert size <= block.size_bytes <= size + MIB + 511
        assert self.allocator.allocated_bytes == before + block.size_bytes
        self.blocks[block] = block.size_bytes
        return block

    @rule(block=consumes(live))
    def free(self, block: Any) -> None:
        if block in self.blocks:
            del self.blocks[block]
            reserved = self.allocator.reserved_bytes
            self.allocator.free(block)
            assert self.allocator.reserved_bytes == reserved

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    @precondition(lambda self: self.blocks)
    @rule()
    def free_all(self) -> None:
        for block in self.blocks:
            self.allocator.free(block)
        self.blocks.clear()
        self.allocator.empty_cache()
        # A free block that had not become one with its neighbour would still be reserved.
        assert self.allocator.reserved_bytes == self.allocator.allocated_bytes == 0

    @invariant()
    def live_blocks_are_as_they_were_handed_out(self) -> None:
        assert all(not block.freed and block.size_bytes == size for block, size in self.blocks.items())

    @invariant()
    def figures_add_up(self) -> None:
        allocator = self.allocator
        assert allocator.allocated_bytes == sum(self.blocks.values())
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes

    @invariant()
    def blocks_are_apart_and_free_neighbours_are_one(self) -> None:
        for pool in {block.pool for block in self.blocks}:
            live = [ends(block) for block in self.blocks if block.pool is pool]
            free = [begin_and_end(block) for block in pool.free_blocks]
            for (_, end), (begin, _) in pairwise(sorted([*live, *free, *pool.gaps.items()])):
                assert end == begin if pool.gaps else end <= begin, "an expandable segment has no holes"
            assert not dict(free).keys() & dict(free).values() and not pool.gaps.keys() & pool.gaps.values()
            assert pool.free_blocks == sorted(pool.free_by_begin.values()) == sorted(pool.free_by_end.values())
            assert free == [(begin, end) for begin, end in free if pool.free_by_begin[begin] == pool.free_by_end[end]]

    @invariant()
    def the_cap_holds(self) -> None:
        cap = self.options.get("cap_bytes")
        beyond = LARGE_SEGMENT_BYTES - 2 * MIB if self.options.get("expandable_segments") else 0
        assert cap is None or self.allocator.peak_reserved_bytes <= cap + beyond


def machine(**options: Any) -> type:
    """Return the test case of allocators with these options."""
    case = type("Machine", (AllocatorMachine,), {"options": options}).TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return case  # type: ignore[no-any-return]


TestDefault = machine()
TestCapped = machine(cap_bytes=90 * MIB)
TestExpandable = machine(expandable_segments=True)
TestCappedExpandable = machine(cap_bytes=90 * MIB, expandable_segments=True)


@st.composite
def traces(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    live: list[int] = []
    for identifier, size in enumerate(draw(st.lists(SIZES, max_size=30))):
        events.append(Allocation(identifier, size))
        live.append(identifier)
        num_freed = draw(st.integers(0, min(2, len(live))))
        events += [Free(live.pop(draw(st.integers(0, len(live) - 1)))) for _ in range(num_freed)]
    return events


@BOTH
@given(events=traces())
@settings(deadline=None)
def test_the_same_trace_has_the_same_peaks(expandable: bool, events: list[Event]) -> None:
    peaks = replay(events, expandable_segments=expandable)
    assert replay(iter(events), expandable_segments=expandable) == peaks
    # A cap with room for the largest segment is never met.
    assert replay(events, expandable_segments=expandable, cap_bytes=peaks.peak_reserved_bytes + 50 * MIB) == peaks


@given(events=traces())
@settings(deadline=None)
def test_a_cap_at_the_peak_changes_nothing_by_default(events: list[Event]) -> None:
    peaks = replay(events)
    assert replay(events, cap_bytes=peaks.peak_reserved_bytes) == peaks


def test_a_replay_returns_peaks_and_retries() -> None:
    events = [Allocation(0, 30 * MIB), Free(0), EmptyCache(), Allocation(1, 40 * MIB), Free(1), Allocation(2, 50 * MIB)]
    peaks = replay(events, cap_bytes=60 * MIB)
    assert peaks.peak_allocated_bytes == peaks.peak_reserved_bytes == 50 * MIB
    assert peaks.num_alloc_retries == 1
    assert replay(events).peak_reserved_bytes == (40 + 50) * MIB


def program(seed: int, *, num_events: int = 3000, most_bytes: int = 400 * MIB) -> Iterator[tuple[int, int, int]]:
    """Yield (identifier, size, stream) of a random program; a size of 0 frees; some sizes repeat."""
    chance = random.Random(seed)
    usual = [int(2 ** chance.uniform(8, 25)) for _ in range(12)]
    live: dict[int, int] = {}
    for identifier in range(num_events):
        size = chance.choice(usual) if chance.random() < 0.7 else int(2 ** chance.uniform(4, 25.5))
        while live and (sum(live.values()) + size > most_bytes or chance.random() < 0.48):
            freed = chance.choice(list(live))
            del live[freed]
            yield freed, 0, 0
        live[identifier] = size
        yield identifier, size, int(chance.random() < 0.1)


def events_in(steps: Iterator[tuple[int, int, int]]) -> list[Event]:
    return [Allocation(number, size, stream) if size else Free(number) for number, size, stream in steps]


CAP_BYTES = 580 * MIB + 12345  # no multiple of anything, so that no rounding of a fraction matters


@BOTH
@pytest.mark.parametrize("seed", [2, 8])
def test_a_cap_costs_retries_and_saves_reserved_bytes(seed: int, expandable: bool) -> None:
    events = events_in(program(seed))
    free, capped = (replay(events, expandable_segments=expandable, cap_bytes=cap) for cap in (None, CAP_BYTES))
    assert capped.num_alloc_retries > free.num_alloc_retries == 0
    assert capped.peak_reserved_bytes < free.peak_reserved_bytes
