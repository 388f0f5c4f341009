"""The replay of a timeline: further optimizer steps and the card's own memory count."""

import zlib
from array import array

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import Allocation, Event, Free
from recordings import replay as replay_singly
from test_allocator import SIZES

from pipeline.memory.replay import AllocatorPeaks, Requests
from pipeline.memory.timeline import Lifetime, Span, Timeline
from pipeline.prediction.cards import find_card
from pipeline.prediction.predict import on_card, predict
from pipeline.prediction.trace import trace

MIB = 2**20
Storage = tuple[int, int, int | None]
"""Bytes, and the indices of the events that allocate and free it."""


def timeline(storages: list[Storage], second_step: int) -> Timeline:
    """Return a timeline of two optimizer steps of which the second begins at an event."""
    lifetimes = tuple(
        Lifetime(
            num_bytes=size,
            shape=(size,),
            dtype=torch.uint8,
            operator="mm",
            module="",
            category="temporary",
            allocated_at=begin,
            freed_at=end,
        )
        for size, begin, end in storages
    )
    placed = {one.allocated_at: number for number, one in enumerate(lifetimes)}
    placed |= {one.freed_at: -1 - number for number, one in enumerate(lifetimes) if one.freed_at is not None}
    spans = tuple(Span(step=step, phase="backward", begin=begin) for step, begin in ((0, 0), (1, second_step)))
    events = tuple(placed[index] for index in range(len(placed)))
    return Timeline.of(lifetimes, events, spans=spans)


FRAGMENTING: list[Storage] = [
    (31 * MIB + MIB // 2, 0, 1),  # the first step leaves a free block
    (17 * MIB, 2, 7),  # the second divides it, and leaves segments in which the third finds no place for this one
    (11 * MIB, 3, 5),
    (25 * MIB + MIB // 2, 4, 6),
]


def test_further_steps_are_replayed_until_one_raises_no_peak() -> None:
    peaks = [Requests.of(timeline(FRAGMENTING, 2), num_steps).replay() for num_steps in (2, 3, 1000)]
    assert [peak.peak_reserved_bytes // MIB for peak in peaks] == [58, 84, 84]


def test_a_step_that_leaves_memory_is_not_repeated() -> None:
    leaking = [*FRAGMENTING, (4 * MIB, 8, None)]
    assert Requests.of(timeline(leaking, 2), 30).num_repeats == 0


@pytest.mark.parametrize(("free_mib", "expected_mib"), [(62, 62), (40, 32), (20, 62)])
def test_cached_memory_is_released_before_a_card_is_full(free_mib: int, expected_mib: int) -> None:
    """What does not fit at all needs what it would need on a larger card."""
    growing: list[Storage] = [(30 * MIB, 0, 1), (32 * MIB, 2, 3)]
    peaks = on_card(Requests.of(timeline(growing, 2), 3), free_mib * MIB, False)
    assert peaks.peak_reserved_bytes == expected_mib * MIB


def test_what_never_fits_is_not_replayed_again() -> None:
    caps: list[int | None] = []

    class Recorded(Requests):
        def replay(self, *, cap_bytes: int | None = None, expandable_segments: bool = False) -> AllocatorPeaks:
            caps.append(cap_bytes)
            return super().replay(cap_bytes=cap_bytes, expandable_segments=expandable_segments)

    requests = Recorded.of(timeline([(30 * MIB, 0, 1), (32 * MIB, 2, 3)], 2), 3)
    assert requests.least_bytes == 32 * MIB
    on_card(requests, 32 * MIB, False)
    on_card(requests, 32 * MIB - 1, False)
    assert caps == [None, 32 * MIB, None]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Return sizes, and the events of optimizer steps; each may leave and free some."""
    usual = draw(st.lists(st.sampled_from([512, 700, MIB, 3 * MIB, 10 * MIB, 11 * MIB]) | SIZES, min_size=1))
    sizes: list[int] = []
    events: list[list[int]] = []
    live: list[int] = []
    for _ in range(2):
        events.append([])
        for size in draw(st.lists(st.sampled_from(usual) | st.just(0), min_size=1, max_size=30)):
            live.append(len(sizes))
            events[-1].append(len(sizes))
            sizes.append(size)
            num_freed = draw(st.integers(0, min(3, len(live))))
            events[-1] += [-1 - live.pop(draw(st.integers(0, len(live) - 1))) for _ in range(num_freed)]
    return sizes, events


@pytest.mark.parametrize("expandable", [False, True])
@given(run=steps(), num_repeats=st.integers(0, 4))
@settings(deadline=None, max_examples=100)
def test_many_requests_at_once_are_served_as_one_after_the_other(
    expandable: bool, run: tuple[list[int], list[list[int]]], num_repeats: int
) -> None:
    sizes, (first, last) = run
    requests = Requests(zlib.compress(array("q", [*sizes, *first, *last])), len(sizes), len(first), num_repeats)
    peaks = requests.replay(expandable_segments=expandable)
    assert requests.replay(cap_bytes=2**60, expandable_segments=expandable) == peaks
    served: list[Event] = []
    live: set[int] = set()
    singly: list[AllocatorPeaks] = []
    for step in [[*first, *last], *[last] * num_repeats]:
        for event in step:
            if event >= 0:
                served.append(Allocation(event, sizes[event]))
                live.add(event)
            elif -1 - event in live:
                served.append(Free(-1 - event))
                live.remove(-1 - event)
        singly.append(replay_singly(served, expandable_segments=expandable))
        if singly[-2:-1] == singly[-1:]:
            break
    assert peaks == singly[-1]


def test_a_squared_error_keeps_the_memory_of_all_errors_on_cuda() -> None:
    experiment = tiny(model="encoder_stack", corpus="random_vectors", micro_batch_size=4)
    lifetimes = trace(experiment, find_card("h200"), experiment.prepare()).lifetimes
    assert {one.num_bytes for one in lifetimes if one.operator == "mse_loss"} == {4 * 4 * 32 * 32}, "float32 [B, T, C]"


def test_flash_attention_without_dropout_is_predicted() -> None:
    experiment = tiny(model="encoder_stack", corpus="random_vectors", micro_batch_size=4, precision="bf16")
    assert predict(experiment, find_card("a100")).peak_allocated_bytes > 0
