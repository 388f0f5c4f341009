"""An Experiment -> its timeline on a device that this machine need not have.

It is recorded on fake tensors and cached on disk. Where that is exact, it is derived from recordings in the cache: of
other micro-batch sizes, of fewer layers, of another loss.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.base.contracts import Hardware, Prepared
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Timeline, same_memory
from pipeline.prediction.case import Case
from pipeline.prediction.exchange_loss import with_other_loss
from pipeline.prediction.extrapolate_batch import Growth, growth_of
from pipeline.prediction.extrapolate_depth import Depth
from pipeline.prediction.families import (
    layer_techniques,
    loss_techniques,
    size_thresholds,
    sizes_extrapolated_from,
)
from pipeline.prediction.four_bit import packed_rows
from pipeline.prediction.loss_difference import Difference, difference_of
from pipeline.prediction.recent import Recent
from pipeline.prediction.recording import record
from pipeline.prediction.repetition import repetition_of
from pipeline.prediction.trace_cache import find_trace, recent_traces, write_trace

STEADY_STEPS = 2
"""Micro-batches of an optimizer step that are recorded; further ones repeat the second."""
LARGEST_GROWTH_BYTES = 1024
"""Bytes that a further micro-batch may add in a steady step: the value of its loss."""
NUM_KEPT = 48
"""Number of growths, of proofs of depth, and of differences that a process keeps."""


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
        on_host = target.kind != "cpu"  # the batch waits in host memory, which is not counted
        timeline = _of_case(replace(case, experiment=short, num_rows=STEADY_STEPS * size if on_host else num_rows))
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
        return record(case.experiment, case.target, case.prepared, case.num_rows)
    return _timeline(case)


@lru_cache(maxsize=1)
def _timeline(case: Case) -> Timeline:
    """Return the timeline of a case: known, or recorded with few layers or as it is.

    The last one is kept: the next experiment may differ in what changes no storage.
    """
    known = _known(case)
    if known is None and case.layers is not None:
        shallow = _timeline(case.of_layers(case.layers.num_layers))
        known = _known(case)
        if known is None and repetition_of(shallow, case.layers) is not None:
            _timeline(case.of_layers(case.layers.num_layers + case.layers.period))
            known = _known(case)
    if known is None:
        known = record(case.experiment, case.target, case.prepared, case.num_rows)
        write_trace(case.file, known)
    return known


def _known(case: Case) -> Timeline | None:
    """Return a timeline that is in the cache, or follows from others there."""
    return find_trace(case.file) or _from_other_sizes(case) or _from_same_size(case)


def _known_at_size(case: Case) -> Timeline | None:
    return find_trace(case.file) or _from_same_size(case)


def _from_same_size(case: Case) -> Timeline | None:
    return _from_other_loss(case) or _from_few_layers(case)


def _from_few_layers(case: Case) -> Timeline | None:
    """Return the timeline of a deep model from that of the same model with few layers.

    Extrapolated by one period of layers, it must be a recording, at this micro-batch size or at another one.
    """
    layers = case.layers
    if layers is None:
        return None
    shallow = _known(case.of_layers(layers.num_layers))
    if shallow is None:
        return None
    # Where sizes decide what is done with a storage, the proof counts for those of the same events alone.
    key = case.of_any_size, len(shallow.events_E) * bool(size_thresholds(case.experiment))
    depth = _depths.get(key)
    timeline = None if depth is None else depth.timeline(shallow)
    if timeline is not None:
        return timeline
    deeper = _known(case.of_layers(layers.num_layers + layers.period))
    depth = None if deeper is None else Depth.of(shallow, deeper, layers)
    if depth is not None and depth.holds_at_other_sizes:
        _depths[key] = depth
    return None if depth is None else depth.timeline(shallow)


def _from_other_loss(case: Case) -> Timeline | None:
    """Return the timeline from that with the model's own loss, and how the two differ in a simpler model.

    That one has few layers, unless what the last layers have offloaded returns while the loss is computed.
    """
    of_loss = loss_techniques(case.experiment)
    simple = case.without(layer_techniques(case.experiment))
    if simple.layers is not None and not size_thresholds(case.experiment):
        simple = simple.of_layers(simple.layers.num_layers)
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
            return growth.extrapolated(case.size, case.target)
    return None


def _growth(case: Case, sizes: tuple[int, int, int]) -> Growth | None:
    """Return the growth between the first two of the sizes, if it predicts the third.

    Of a deep model the third is one with few layers.
    """
    cases = [case.of_size(size) for size in sizes]
    key = cases[0].file, sizes
    if key not in _growths:
        recorded = _all_known([each.of_layers(case.layers.num_layers) for each in cases] if case.layers else cases)
        known = recorded and _all_known(cases[:2])
        if not recorded or not known:
            return None
        _growths[key] = _between(sizes, known) if _predicts_third(sizes, recorded, case.target) else None
    return _growths[key]


_growths: Recent[tuple[Path, tuple[int, int, int]], Growth | None] = Recent(NUM_KEPT)
"""Growths by the file of the smallest size, and the sizes; None where these do not grow linearly."""
_depths: Recent[tuple[Path, int], Depth] = Recent(NUM_KEPT)
"""What a recording has proved of a model's depth."""
_differences: Recent[Path, Difference | None] = Recent(NUM_KEPT)
"""Differences by the file with the other loss; None where it is not that of a loss."""


def forget() -> None:
    """Forget what this process keeps in memory of timelines; their files stay."""
    _timeline.cache_clear()
    for kept in (recent_traces, _growths, _depths, _differences):
        kept.clear()


def _predicts_third(sizes: tuple[int, int, int], timelines: list[Timeline], target: Hardware) -> bool:
    """Whether the growth between the first two sizes predicts the third."""
    growth = _between(sizes, timelines)
    return growth is not None and same_memory(growth.extrapolated(sizes[2], target), timelines[2])


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
    """Return what decides, at a micro-batch size, which operators run: the chunks of techniques, and kernels' rows."""
    train, width = case.prepared.train, case.description.width
    num_tokens = size * train.num_positions(train.batch([0]))
    chunks = [technique.num_chunks(num_tokens, width) for technique in case.experiment.techniques]
    settings: Any = case.experiment.settings
    is_packed = settings.adapter == "qlora" and case.target.kind == "cuda"
    return *chunks, packed_rows(num_tokens) if is_packed else None
