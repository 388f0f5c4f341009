"""Experiments -> Predictions, in worker processes: those first from whose recordings others are derived."""

import gc
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError, first_line
from pipeline.config.experiment import Experiment
from pipeline.memory.device import num_cores
from pipeline.memory.work import combined
from pipeline.prediction.families import derivation_round, family_of, others_need
from pipeline.prediction.predict import predict, predict_on_card
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.worker_pool import run_all, worker_pool

NUM_IN_TASK = 40
"""Maximum number of experiments in a worker's task."""
NUM_FAMILIES_PER_PROCESS = 4
"""Number of families for each process from which on a process predicts a family as a whole."""


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
    budget_bytes: int | None = None,
    num_processes: int | None = None,
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
    """Yield the index of each experiment and its prediction, or why it cannot be predicted.

    `budget_bytes` is what a card has for each. `num_processes` is the number of worker processes on a CPU, which end
    with the iterator; by default one for each core.
    """
    if target.kind == "cuda":
        yield from _predict_on_card(experiments, target, budget_bytes)
        return
    num_processes = num_processes or min(num_cores(), len(experiments))
    with worker_pool(max(1, num_processes)) as pool:
        for tasks in rounds(experiments, num_processes):
            sent = [[experiments[number] for number in numbers] for numbers in tasks]
            for number, predictions in run_all(pool, partial(_predict_these, target=target), sent):
                yield from zip(tasks[number], predictions, strict=True)


def _predict_on_card(
    experiments: Sequence[Experiment], target: Hardware, budget_bytes: int | None
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
    """Yield predictions whose work is recorded at the smallest and the largest micro-batch, and linear between them."""
    families: dict[str, list[int]] = {}
    for number, experiment in sorted(enumerate(experiments), key=lambda each: each[1].micro_batch_size):
        reason = experiment.unsupported(target)
        if reason is None:
            families.setdefault(family_of(experiment), []).append(number)
        else:
            yield number, InvalidInputError(reason)
    recorded: dict[int, Prediction] = {}
    ends = [number for numbers in families.values() for number in dict.fromkeys((numbers[0], numbers[-1]))]
    for number, prediction in _on_card(experiments, ends, target, budget_bytes, is_recorded=True):
        if isinstance(prediction, Prediction):
            recorded[number] = prediction
        yield number, prediction
    ends_of = {
        n: (recorded.get(numbers[0]), recorded.get(numbers[-1])) for numbers in families.values() for n in numbers
    }
    between = [number for numbers in families.values() for number in numbers[1:-1]]
    known = [number for number in between if all(ends_of[number])]
    for number, prediction in _on_card(experiments, known, target, budget_bytes, is_recorded=False):
        low, high = ends_of[number]
        assert low is not None and high is not None
        yield number, _with_work(prediction, low, high) if isinstance(prediction, Prediction) else prediction
    others = [number for number in between if not all(ends_of[number])]
    yield from _on_card(experiments, others, target, budget_bytes, is_recorded=True)


def _on_card(
    experiments: Sequence[Experiment],
    numbers: Sequence[int],
    target: Hardware,
    budget_bytes: int | None,
    *,
    is_recorded: bool,
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
    """Yield some of the experiments' predictions."""
    those = [experiments[number] for number in numbers]
    outcomes = predict_on_card(those, target, budget_bytes=budget_bytes, is_recorded=is_recorded)
    with closing(outcomes):
        for place, outcome in outcomes:
            yield numbers[place], outcome if isinstance(outcome, Prediction) else why_not_predicted(outcome)


def _with_work(prediction: Prediction, low: Prediction, high: Prediction) -> Prediction:
    """Return a prediction with the work that is linear between those of a smaller and a larger micro-batch."""
    share = (prediction.micro_batch_size - low.micro_batch_size) / max(1, high.micro_batch_size - low.micro_batch_size)
    work = combined(lambda one, other: one + share * (other - one), low.pass_work, high.pass_work)
    work = replace(work, sent_bytes=low.pass_work.sent_bytes)  # the same for any size, but for that of a single pass
    return replace(prediction, pass_work=work, last_pass_work=low.last_pass_work, update_work=low.update_work)


def why_not_predicted(error: Exception) -> InvalidInputError:
    """Return what is said of a configuration where predicting it raises this error."""
    if isinstance(error, InvalidInputError):
        return error
    return InvalidInputError(f"predicting it raises {type(error).__name__}: {first_line(error)}")


def counted_causes(causes: Iterable[str], total: int) -> tuple[str, ...]:
    """Return how many of `total` configurations are not predicted, a sentence for each cause."""
    return tuple(
        f"{count} of {total} configurations {'is' if count == 1 else 'are'} not predicted: {cause}"
        for cause, count in Counter(causes).most_common()
    )


def _predict_these(experiments: Sequence[Experiment], target: Hardware) -> list[Prediction | InvalidInputError]:
    with _collected_at_end():
        return [_prediction_or_error(experiment, target) for experiment in experiments]


@contextmanager
def _collected_at_end() -> Iterator[None]:
    """Collect garbage only at the end of this context, and only what it made: timelines are many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.collect(0)


def _prediction_or_error(experiment: Experiment, target: Hardware) -> Prediction | InvalidInputError:
    try:
        return predict(experiment, target)
    except Exception as error:  # whatever a model or a technique raises on fake tensors
        return why_not_predicted(error)


def rounds(experiments: Sequence[Experiment], num_processes: int) -> list[list[list[int]]]:
    """Return the indices of the experiments in tasks, in rounds: first those from which others are derived.

    A task has experiments of one family, which share recorded timelines; the smallest micro-batches come first.
    """
    families: dict[str, list[int]] = {}
    for number, experiment in sorted(enumerate(experiments), key=lambda each: each[1].micro_batch_size):
        families.setdefault(family_of(experiment), []).append(number)
    by_round: dict[int, list[list[int]]] = {}
    for numbers in families.values():
        by_round.setdefault(derivation_round(experiments[numbers[0]]), []).append(numbers)
    return [tasks for _, alike in sorted(by_round.items()) for tasks in _split(experiments, alike, num_processes)]


def _split(
    experiments: Sequence[Experiment], families: list[list[int]], num_processes: int
) -> Iterator[list[list[int]]]:
    """Yield the tasks of a round; where families are few, first the sizes that others are extrapolated from."""
    recorded = [[n for n in numbers if others_need(experiments[n])] for numbers in families]
    others = [[n for n in numbers if not others_need(experiments[n])] for numbers in families]
    if len(families) >= NUM_FAMILIES_PER_PROCESS * num_processes:
        yield _parts([*first, *rest] for first, rest in zip(recorded, others, strict=True))
        return
    by_size: dict[tuple[int, int], list[int]] = {}
    for family, numbers in enumerate(recorded):
        for number in numbers:
            by_size.setdefault((family, experiments[number].micro_batch_size), []).append(number)
    yield _parts(by_size.values())
    yield _parts(others)


def _parts(groups: Iterable[list[int]]) -> list[list[int]]:
    return [group[begin : begin + NUM_IN_TASK] for group in groups for begin in range(0, len(group), NUM_IN_TASK)]
