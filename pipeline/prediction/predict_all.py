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
SPLIT = ("micro_batch_size", "accumulation_steps", "effective_batch_size")
"""Settings of how a batch is split."""


def predict_each(
    experiments: Sequence[Experiment],
    target: Hardware,
    *,
    budget_bytes: int | None = None,
    is_recorded: bool = True,
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
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
) -> Generator[tuple[int, Prediction | InvalidInputError], None, None]:
    """Yield predictions whose work is recorded at the smallest and the largest micro-batch, and linear between them."""
    families: dict[str, list[int]] = {}
    for number, experiment in sorted(enumerate(experiments), key=lambda each: each[1].micro_batch_size):
        reason = experiment.unsupported(target)
        if reason is None:
            families.setdefault(_family_of(experiment), []).append(number)
        else:
            yield number, InvalidInputError(reason)
    if not is_recorded:
        yield from _on_card(experiments, [*chain(*families.values())], target, budget_bytes, is_recorded=False)
        return
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
