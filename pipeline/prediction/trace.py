"""An Experiment -> its timeline on a CPU.

It is recorded on fake tensors and cached on disk. Where that is exact, it is derived from recordings in the cache: of
other micro-batch sizes, or of another loss.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from pipeline.base.contracts import Hardware, Prepared
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Timeline, same_memory
from pipeline.prediction.case import Case
from pipeline.prediction.exchange_loss import with_other_loss
from pipeline.prediction.extrapolate_batch import Growth, growth_of
from pipeline.prediction.families import (
    layer_techniques,
    loss_techniques,
    size_thresholds,
    sizes_extrapolated_from,
)
from pipeline.prediction.loss_difference import Difference, difference_of
from pipeline.prediction.recent import Recent
from pipeline.prediction.recording import record
from pipeline.prediction.trace_cache import find_trace, recent_traces, write_trace

STEADY_STEPS = 2
"""Micro-batches of an optimizer step that are recorded; further ones repeat the second."""
LARGEST_GROWTH_BYTES = 1024
"""Bytes that a further micro-batch may add in a steady step: the value of its loss."""
NUM_KEPT = 48
"""Number of growths and of differences that a process keeps."""


def trace(experiment: Experiment, target: Hardware, prepared: Prepared) -> Timeline:
    """Return the timeline of two optimizer steps on `target`.

    Of more than two micro-batches in a step only two are recorded, if the second leaves no memory behind.

    Raises:
        InvalidInputError: the run reads the values of tensors, or the cache folder cannot be written.

    """
    experiment = experiment.with_random_weights(experiment.settings.device)
    settings, num_rows = experiment.settings, experiment.effective_batch_size
    size = experiment.micro_batch_size * experiment.world_size
    case = Case(
        experiment,
        target,
        prepared,
        num_rows,
        experiment.model.identity(settings.model),
        experiment.description,
        num_rows,
    )
    if num_rows > STEADY_STEPS * size:
        fewer = {"accumulation_steps": STEADY_STEPS, "effective_batch_size": STEADY_STEPS * size}
        short = Experiment(settings.model_copy(update=fewer))
        timeline = _of_case(replace(case, experiment=short))  # the whole batch is alive during all micro-batches
        if is_steady(timeline):
            return timeline
    return _of_case(case)


def is_steady(timeline: Timeline) -> bool:
    """Whether the second micro-batch of the last optimizer step leaves the storages that it found, and hardly more."""
    step = max(span.step for span in timeline.spans if span.phase == "backward")
    ends = [after.begin for span, after in pairwise(timeline.spans) if (span.step, span.phase) == (step, "backward")]
    if len(ends) != STEADY_STEPS:
        return False
    found, left = (set(timeline.alive(end - 1).tolist()) for end in ends)
    freed, new = (
        Counter((int(timeline.num_bytes_N[number]), timeline.origins[number]) for number in numbers)
        for numbers in (found - left, left - found)
    )
    return freed <= new and sum(num_bytes for num_bytes, _ in (new - freed).elements()) <= LARGEST_GROWTH_BYTES


def _of_case(case: Case) -> Timeline:
    if case.identity is None:
        return record(case.experiment, case.prepared, case.num_rows)
    return _timeline(case)


@lru_cache(maxsize=1)
def _timeline(case: Case) -> Timeline:
    """Return the timeline of a case: known or recorded.

    The last one is kept: the next experiment may differ in what changes no storage.
    """
    known = _known(case)
    if known is None:
        known = record(case.experiment, case.prepared, case.num_rows)
        write_trace(case.file, known)
    return known


def _known(case: Case) -> Timeline | None:
    """Return a timeline that is in the cache, or follows from others there."""
    return find_trace(case.file) or _from_other_sizes(case) or _from_other_loss(case)


def _known_at_size(case: Case) -> Timeline | None:
    return find_trace(case.file) or _from_other_loss(case)


def _from_other_loss(case: Case) -> Timeline | None:
    """Return the timeline from that with the model's own loss, and how the two differ in a simpler model."""
    of_loss = loss_techniques(case.experiment)
    simple = case.without(layer_techniques(case.experiment))
    if not of_loss or simple == case:
        return None
    difference = _difference(simple.without(of_loss), simple)
    timeline = None if difference is None else _known(case.without(of_loss))
    return None if difference is None or timeline is None else with_other_loss(timeline, difference)


def _difference(own: Case, other: Case) -> Difference | None:
    """Return the difference between the timelines of two cases, if both are known and it is that of a loss."""
    if other.file not in _differences:
        timeline = _known(other)
        own_timeline = None if timeline is None else _known(own)
        if timeline is None or own_timeline is None:
            return None
        _differences[other.file] = difference_of(own_timeline, timeline)
    return _differences[other.file]


def _from_other_sizes(case: Case) -> Timeline | None:
    """Return the timeline extrapolated from those of other micro-batch sizes.

    Their layers must save no storages that reach a threshold between them and this size.
    """
    thresholds, possible = size_thresholds(case.experiment), sizes_extrapolated_from(case.experiment, case.batch)
    for sizes in zip(possible, possible[1:], possible[2:], strict=False):
        if case.size <= sizes[0]:
            return None  # one sequence may take other code paths: an axis of one element is always contiguous
        alike = len({_branches(case, size) for size in (*sizes, case.size)}) == 1
        growth = _growth(case, sizes) if alike else None
        if growth is not None and not growth.crosses(case.size, thresholds):
            return growth.extrapolated(case.size)
    return None


def _growth(case: Case, sizes: tuple[int, int, int]) -> Growth | None:
    """Return the growth between the first two of the sizes, if it predicts the third."""
    cases = [case.of_size(size) for size in sizes]
    key = cases[0].file, sizes
    if key not in _growths:
        known = _all_known(cases)
        if not known:
            return None
        growth = _between(sizes, known)
        holds = growth is not None and same_memory(growth.extrapolated(sizes[2]), known[2])
        _growths[key] = growth if holds else None
    return _growths[key]


_growths: Recent[tuple[Path, tuple[int, int, int]], Growth | None] = Recent(NUM_KEPT)
"""Growths by the file of the smallest size, and the sizes; None where these do not grow linearly."""
_differences: Recent[Path, Difference | None] = Recent(NUM_KEPT)
"""Differences by the file with the other loss; None where it is not that of a loss."""


def forget() -> None:
    """Forget what this process keeps in memory of timelines; their files stay."""
    _timeline.cache_clear()
    for kept in (recent_traces, _growths, _differences):
        kept.clear()


def _between(sizes: tuple[int, int, int], timelines: list[Timeline]) -> Growth | None:
    """Return the growth between the first two sizes."""
    return growth_of((sizes[0], timelines[0]), (sizes[1], timelines[1]))


def _all_known(cases: list[Case]) -> list[Timeline] | None:
    """Return the timelines of all cases; None if one is not known."""
    known = []
    for case in reversed(cases):  # the last one is recorded last
        timeline = _known_at_size(case)
        if timeline is None:
            return None
        known.append(timeline)
    return known[::-1]


def _branches(case: Case, size: int) -> tuple[int | None, ...]:
    """Return what decides, at a micro-batch size, which operators run: the chunks of techniques."""
    train, width = case.prepared.train, case.description.width
    num_tokens = size * train.num_positions(train.batch([0]))
    return tuple(technique.num_chunks(num_tokens, width) for technique in case.experiment.techniques)
