"""An Experiment on fake tensors -> Prediction: its peak memory on a device that this machine need not have."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.results import limited_peak
from pipeline.config.experiment import Experiment
from pipeline.memory.allocator import OutOfMemoryError
from pipeline.memory.blocks import LARGE_SEGMENT_BYTES
from pipeline.memory.breakdown import Breakdown, at_peak
from pipeline.memory.replay import AllocatorPeaks, Requests
from pipeline.memory.timeline import Timeline
from pipeline.memory.work import Work
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.trace import family_of, others_need, round_of, trace
from pipeline.runtime.environment import uses_expandable_segments
from pipeline.runtime.fork_server import has_server, num_cores
from pipeline.runtime.worker_pool import run_all, worker_pool

NUM_WORTH_A_SERVER = 32
"""Number of experiments from which on worker processes are started for them."""
NUM_IN_TASK = 40
"""Maximum number of experiments in a worker's task."""
NUM_FAMILIES_PER_PROCESS = 4
"""Number of families for each process from which on a process predicts a family as a whole."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted memory of a run on a device; a value that the device does not have is None."""

    target: Hardware
    peak_allocated_bytes: int
    """As the device's allocator counts it: rounded up on CUDA."""
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    """Reserved bytes and the CUDA context."""
    breakdown: Breakdown
    """Breakdown of the peak, before the allocator rounds."""
    phase_bytes: Mapping[str, int]
    """Maximum of the bytes alive in each phase, before the allocator rounds."""
    micro_batch_size: int
    pass_work: Work
    """Work of one forward and backward pass at this micro-batch size, recomputation included.

    It is the mean over an optimizer step's passes, of which the first does not add to gradients.
    """
    update_work: Work
    """Work of an optimizer step after its passes: clipping and the optimizer."""
    requests: Requests = field(repr=False)
    expandable_segments: bool = False
    _replayed: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)
    """Whether it fits, by the caps at which it was replayed."""

    @property
    def sequence_flops(self) -> float:
        """Floating-point operations for one sequence, recomputation included: the same for any micro-batch size."""
        return self.pass_work.flops / self.micro_batch_size

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget limits."""
        return limited_peak(self.peak_allocated_bytes, self.peak_reserved_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Whether the run stays within a budget: on CUDA a cap on reserved bytes, at which cached ones are released.

        Expandable segments may grow beyond the cap, which is over the budget too.
        """
        if self.peak_reserved_bytes is None or self.peak_allocated_bytes > budget_bytes:
            return self.peak_allocated_bytes <= budget_bytes
        if self.peak_reserved_bytes <= budget_bytes:
            return True
        if any(cap <= budget_bytes for cap, fits in self._replayed.items() if fits):
            return True
        if any(cap >= budget_bytes for cap, fits in self._replayed.items() if not fits):
            return False
        self._replayed[budget_bytes] = fits = self._fits_after_release(budget_bytes)
        return fits

    def _fits_after_release(self, budget_bytes: int) -> bool:
        try:
            peaks = self.requests.replay(cap_bytes=budget_bytes, expandable_segments=self.expandable_segments)
        except OutOfMemoryError:
            return False
        return peaks.peak_reserved_bytes <= budget_bytes


def predict(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None = None,
    *,
    expandable_segments: bool | None = None,
    context_bytes: int | None = None,
) -> Prediction:
    """Return the predicted memory of two optimizer steps of `experiment` on `target`.

    One example of the corpus suffices, however large the batch; the corpus is read unless `prepared` is given.
    `expandable_segments` overrides the environment variables of the run's process. `context_bytes` is the size of the
    CUDA context, by default that of context_bytes_of().

    Raises:
        InvalidInputError: the target does not support it, or it reads the values of tensors.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(reason)
    if context_bytes is None:
        context_bytes = context_bytes_of(target)
    if expandable_segments is None:
        expandable_segments = uses_expandable_segments(experiment)
    timeline = trace(experiment, target, prepared or experiment.read_corpus())
    requests = Requests.of(timeline, experiment.settings.num_steps)
    peaks = (
        on_card(requests, target.memory_bytes - context_bytes, expandable_segments) if target.kind == "cuda" else None
    )
    return Prediction(
        target=target,
        peak_allocated_bytes=peaks.peak_allocated_bytes if peaks else int(timeline.allocated_bytes_E.max()),
        peak_reserved_bytes=peaks.peak_reserved_bytes if peaks else None,
        peak_device_bytes=peaks.peak_reserved_bytes + context_bytes if peaks else None,
        breakdown=at_peak(timeline),
        phase_bytes=_by_phase(timeline),
        micro_batch_size=experiment.micro_batch_size,
        pass_work=timeline.pass_work(experiment.effective_batch_size // experiment.micro_batch_size),
        update_work=timeline.update_work,
        requests=requests,
        expandable_segments=expandable_segments,
    )


def on_card(requests: Requests, free_bytes: int, expandable_segments: bool) -> AllocatorPeaks:
    """Return the peaks on a card with so much memory, where cached segments are released before it is full.

    Where the requests do not fit, the peaks are those on a card of any size.
    """
    peaks = requests.replay(expandable_segments=expandable_segments)
    beyond_bytes = LARGE_SEGMENT_BYTES if expandable_segments else 0  # pages may go beyond the cap
    if peaks.peak_reserved_bytes <= free_bytes or requests.least_bytes > free_bytes + beyond_bytes:
        return peaks
    try:
        return requests.replay(cap_bytes=free_bytes, expandable_segments=expandable_segments)
    except OutOfMemoryError:
        return peaks


def predict_all(
    experiments: Sequence[Experiment],
    target: Hardware,
    **options: Any,
) -> Generator[tuple[int, Prediction], None, None]:
    """Yield the index of each experiment and its prediction, as completed.

    Options are those of predict_each().

    Raises:
        InvalidInputError: as predict().

    """
    with closing(predict_each(experiments, target, **options)) as predictions:
        for number, prediction in predictions:
            if isinstance(prediction, InvalidInputError):
                raise prediction
            yield number, prediction


def predict_each(
    experiments: Sequence[Experiment],
    target: Hardware,
    *,
    expandable_segments: bool | None = None,
    context_bytes: int | None = None,
    num_processes: int | None = None,
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
    """Yield the index of each experiment and its prediction, or why it cannot be predicted.

    `num_processes` is the number of worker processes, which end with the iterator; 0 predicts in this process. By
    default there is one for each core if the fork server is running or the experiments are many, else none.
    """
    if context_bytes is None:
        context_bytes = context_bytes_of(target)  # once, not in each worker
    options = {"expandable_segments": expandable_segments, "context_bytes": context_bytes}
    work = partial(_predict_these, target=target, options=options)
    if num_processes is None:
        pays = has_server() or len(experiments) >= NUM_WORTH_A_SERVER
        num_processes = min(num_cores(), len(experiments)) if pays else 0
    with worker_pool(num_processes) if num_processes else nullcontext() as pool:
        for tasks in _rounds(experiments, num_processes):
            sent = [[experiments[number] for number in numbers] for numbers in tasks]
            done = run_all(pool, work, sent) if pool else enumerate(map(work, sent))
            for number, predictions in done:
                yield from zip(tasks[number], predictions, strict=True)


def _predict_these(
    experiments: Sequence[Experiment], target: Hardware, options: Mapping[str, Any]
) -> list[Prediction | InvalidInputError]:
    return [_prediction_or_error(experiment, target, options) for experiment in experiments]


def _prediction_or_error(
    experiment: Experiment, target: Hardware, options: Mapping[str, Any]
) -> Prediction | InvalidInputError:
    try:
        return predict(experiment, target, **options)
    except InvalidInputError as error:
        return error
    except Exception as error:  # whatever a model or a technique raises on fake tensors
        return InvalidInputError(f"a configuration cannot be predicted: {type(error).__name__}: {first_line(error)}")


def _rounds(experiments: Sequence[Experiment], num_processes: int) -> list[list[list[int]]]:
    """Return the indices of the experiments in tasks, in rounds: first those from which others are derived.

    A task has experiments of one family, which share recorded timelines. Where families are few, the sizes that others
    are extrapolated from are a round of their own.
    """
    families: dict[str, tuple[list[int], list[int]]] = {}
    for number, experiment in enumerate(experiments):
        recorded, others = families.setdefault(family_of(experiment), ([], []))
        (recorded if others_need(experiment) else others).append(number)
    by_round: dict[int, list[tuple[list[int], list[int]]]] = {}
    for recorded, others in families.values():
        by_round.setdefault(round_of(experiments[[*recorded, *others][0]]), []).append((recorded, others))
    rounds: list[list[list[int]]] = []
    for _, alike in sorted(by_round.items()):
        if len(alike) >= NUM_FAMILIES_PER_PROCESS * num_processes:
            rounds.append(_parts([*recorded, *others] for recorded, others in alike))
        else:
            by_size: dict[tuple[int, int], list[int]] = {}
            for family, (recorded, _) in enumerate(alike):
                for number in recorded:
                    by_size.setdefault((family, experiments[number].micro_batch_size), []).append(number)
            rounds += [_parts(by_size.values()), _parts(others for _, others in alike)]
    return rounds


def _parts(groups: Iterable[list[int]]) -> list[list[int]]:
    return [group[begin : begin + NUM_IN_TASK] for group in groups for begin in range(0, len(group), NUM_IN_TASK)]


def _by_phase(timeline: Timeline) -> dict[str, int]:
    greatest = np.maximum.reduceat(timeline.allocated_bytes_E, [span.begin for span in timeline.spans])
    phases: dict[str, int] = {}
    for span, num_bytes in zip(timeline.spans, greatest.tolist(), strict=True):
        phases[span.phase] = max(phases.get(span.phase, 0), num_bytes)
    return phases
