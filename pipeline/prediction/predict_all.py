"""Experiments -> Predictions, several at a time: on a CPU in worker processes, on a card in those of its host."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.memory.work import combined
from pipeline.prediction.predict import predict, predict_on_card
from pipeline.prediction.prediction import Prediction
from pipeline.prediction.prediction_cache import IRRELEVANT
from pipeline.runtime.worker_pool import run_all, worker_pool

Found = TypeVar("Found")
Predicted = Prediction | InvalidInputError
"""A prediction, or why there is none."""
SPLIT = ("micro_batch_size", "accumulation_steps", "effective_batch_size")
"""Settings of how a batch is split."""


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
        yield from _predict_on_card(experiments, target, budget_bytes, is_recorded)
        return
    with worker_pool(max(1, min(num_cores(), len(experiments)))) as pool:
        yield from run_all(pool, partial(or_why_not, predict, target=target), experiments)


def _predict_on_card(
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
