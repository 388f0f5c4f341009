"""Experiments -> Predictions: on a CPU by fake tensors, on CUDA by their own runs on a simulated card.

Several are predicted at a time: on a CPU in worker processes, on a card in those of its host.
"""

import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.memory.breakdown import at_peak
from pipeline.memory.work import combined
from pipeline.prediction.card_processes import card_processes
from pipeline.prediction.card_run import run_on_card
from pipeline.prediction.cards import variables_on
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.fake.trace import trace
from pipeline.prediction.prediction import Prediction
from pipeline.prediction.prediction_cache import IRRELEVANT, cached
from pipeline.runtime.worker_pool import run_all, worker_pool
from pipeline.training.typical_step import TypicalStep

Found = TypeVar("Found")
Predicted = Prediction | InvalidInputError
"""A prediction, or why there is none."""
SPLIT = ("micro_batch_size", "accumulation_steps", "effective_batch_size")
"""Settings of how a batch is split."""


def predict(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None = None,
    *,
    budget_bytes: int | None = None,
) -> Prediction:
    """Return the predicted memory of a run of `experiment` on `target`.

    One example of the corpus suffices, however large the batch; the corpus is read unless `prepared` is given. Where
    micro-batches differ in length, the peak is that of the first two steps, which are padded to the longest one.
    `budget_bytes` is what a card has for it, by default all beside the CUDA context.

    Raises:
        InvalidInputError: the target does not support it, it reads the values of tensors, or no card can be simulated.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(reason)
    if target.kind == "cuda":
        with closing(predict_on_card([experiment], target, prepared, budget_bytes)) as outcomes:
            [(_, outcome)] = outcomes
        if not isinstance(outcome, Prediction):
            raise outcome
        return outcome
    return cached(experiment, target, prepared, _predict_on_cpu)


def _predict_on_cpu(experiment: Experiment, prepared: Prepared, typical: TypicalStep) -> Prediction:
    """Return the prediction from a recording on fake tensors."""
    timeline = trace(experiment, prepared)
    peak = int(timeline.allocated_bytes_E.max())
    return Prediction(
        peak_allocated_bytes=peak,
        smallest_budget_bytes=peak,
        breakdown=at_peak(timeline),
        micro_batch_size=experiment.micro_batch_size,
        pass_work=timeline.pass_work(experiment.accumulation_steps).shortened(typical.share, typical.square_share),
        update_work=timeline.update_work,
        num_tokens=typical.num_tokens,
    )


def predict_on_card(
    experiments: Sequence[Experiment],
    target: Hardware,
    prepared: Prepared | None = None,
    budget_bytes: int | None = None,
    is_recorded: bool = True,
) -> Generator[tuple[int, Prediction | Exception], None, None]:
    """Yield the number of each experiment and its prediction from a simulated card, or why there is none.

    Without a recording it has no work and no breakdown.

    Raises:
        InvalidInputError: no card can be simulated.

    """
    context = context_bytes_of(target)
    free_bytes = target.memory_bytes - context
    budget_bytes = free_bytes if budget_bytes is None else min(budget_bytes, free_bytes)
    run = partial(run_on_card, context_bytes=context, budget_bytes=budget_bytes, is_recorded=is_recorded)
    asked = context, budget_bytes
    work = partial(cached, target=target, prepared=prepared, predict=run, asked=asked, needs_breakdown=is_recorded)
    card = variables_on(target)
    variables = [{**os.environ, **one.environment, **card, **_rank_of(one)} for one in experiments]
    yield from card_processes().call(work, experiments, variables)


def _rank_of(experiment: Experiment) -> dict[str, str]:
    """Return the variable that makes a process the first of several ranks."""
    return {} if experiment.world_size == 1 else {"SIMULATED_CARD_RANK": f"0/{experiment.world_size}"}


def predict_each(
    experiments: Sequence[Experiment],
    target: Hardware,
    *,
    budget_bytes: int | None = None,
    is_recorded: bool = True,
) -> Generator[tuple[int, Predicted], None, None]:
    """Yield the index of each experiment and its prediction, or why it cannot be predicted, as completed.

    `budget_bytes` is what a card has for each; without a recording, predictions on one have no work and no breakdown.
    """
    if target.kind == "cuda":
        yield from _predict_families(experiments, target, budget_bytes, is_recorded)
        return
    with worker_pool(max(1, min(num_cores(), len(experiments)))) as pool:
        yield from run_all(pool, partial(or_why_not, predict, target=target), experiments)


def _predict_families(
    experiments: Sequence[Experiment], target: Hardware, budget_bytes: int | None, is_recorded: bool
) -> Generator[tuple[int, Predicted], None, None]:
    """Yield predictions whose work is recorded at the smallest and the largest micro-batch, and linear between them."""

    def of_some(numbers: Sequence[int], *, is_recorded: bool) -> Generator[tuple[int, Predicted], None, None]:
        some = [experiments[number] for number in numbers]
        outcomes = predict_on_card(some, target, budget_bytes=budget_bytes, is_recorded=is_recorded)
        with closing(outcomes):
            for place, outcome in outcomes:
                yield numbers[place], outcome if isinstance(outcome, Prediction) else why_not_predicted(outcome)

    families: dict[str, list[int]] = {}
    for number, experiment in sorted(enumerate(experiments), key=lambda each: each[1].micro_batch_size):
        reason = experiment.unsupported(target)
        if reason is None:
            families.setdefault(_family_of(experiment), []).append(number)
        else:
            yield number, InvalidInputError(reason)
    if not is_recorded:
        yield from of_some([*chain(*families.values())], is_recorded=False)
        return
    recorded: dict[int, Prediction] = {}
    ends = [number for numbers in families.values() for number in dict.fromkeys((numbers[0], numbers[-1]))]
    for number, prediction in of_some(ends, is_recorded=True):
        if isinstance(prediction, Prediction):
            recorded[number] = prediction
        yield number, prediction
    ends_of: dict[int, tuple[Prediction, Prediction]] = {}
    others: list[int] = []
    for first, *between, last in (numbers for numbers in families.values() if len(numbers) > 1):
        if first in recorded and last in recorded:
            ends_of |= dict.fromkeys(between, (recorded[first], recorded[last]))
        else:
            others += between
    for number, prediction in of_some([*ends_of], is_recorded=False):
        yield number, _with_work(prediction, *ends_of[number]) if isinstance(prediction, Prediction) else prediction
    yield from of_some(others, is_recorded=True)


def _with_work(prediction: Prediction, low: Prediction, high: Prediction) -> Prediction:
    """Return a prediction with the work that is linear between those of a smaller and a larger micro-batch."""
    share = (prediction.micro_batch_size - low.micro_batch_size) / max(1, high.micro_batch_size - low.micro_batch_size)
    work = combined(lambda one, other: one + share * (other - one), low.pass_work, high.pass_work)
    work = replace(work, sent_bytes=low.pass_work.sent_bytes)  # the same for any size, but for that of a single pass
    return replace(
        prediction,
        breakdown=None,  # a cached one may have it
        pass_work=work,
        last_pass_work=low.last_pass_work,
        update_work=low.update_work,
    )


def or_why_not(function: Callable[..., Found], *arguments: object, **more: object) -> Found | InvalidInputError:
    """Return what a function predicts with these arguments, or why it does not."""
    try:
        return function(*arguments, **more)
    except Exception as error:  # whatever a model or a technique raises, as on fake tensors
        return why_not_predicted(error)


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


def _family_of(experiment: Experiment) -> str:
    """Return what experiments have in common that differ only in how their batch is split, or in no storage."""
    names = (*SPLIT, *IRRELEVANT)
    left_out = {name: None for name in names if name in type(experiment.settings).model_fields}
    return repr(experiment.settings.model_copy(update=left_out))
