"""The longest sequences of configurations whose predicted memory fits a budget."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.fake_batches import OfLength
from pipeline.prediction.predict import or_why_not, predict
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.worker_pool import run_all, worker_pool

MULTIPLE = 64
"""Lengths are multiples of it, in tokens."""
LARGEST_LENGTH = 2**20
"""The longest length that is tried of a model without a limit."""


@dataclass(frozen=True)
class Longest:
    """A configuration with the longest sequences that fit, or with the shortest that are tried if none does."""

    experiment: Experiment
    prediction: Prediction
    next_peak_bytes: int | None
    """The predicted peak at the next length, which does not fit; None at the end of the model's positions."""


def largest_length(experiment: Experiment) -> int:
    """Return the largest multiple of MULTIPLE that the model takes.

    Raises:
        InvalidInputError: it takes fewer tokens.

    """
    limit = experiment.description.max_sequence_length or LARGEST_LENGTH
    if limit < MULTIPLE:
        raise InvalidInputError(
            f"sequence_length=auto tries multiples of {MULTIPLE}, and {experiment.settings.model} takes {limit} tokens "
            "at most; give sequence_length itself"
        )
    return limit // MULTIPLE * MULTIPLE


def longest_of_each(
    experiments: Sequence[Experiment], target: Hardware, budget_bytes: int
) -> Generator[tuple[int, Longest | InvalidInputError], None, None]:
    """Yield the number of each experiment and its longest sequences, or why it cannot be predicted.

    The corpus gives the shape of an example, no length.
    """
    work = partial(or_why_not, _longest, target=target, budget_bytes=budget_bytes)
    if target.kind == "cuda":  # each length runs in a process of its own
        context_bytes_of(target)  # it is measured once, by no thread beside another
        with ThreadPoolExecutor(num_cores()) as threads:
            futures = {threads.submit(work, one): number for number, one in enumerate(experiments)}
            try:
                yield from ((futures[done], done.result()) for done in as_completed(futures))
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        return
    with worker_pool(max(1, min(num_cores(), len(experiments)))) as pool:
        yield from run_all(pool, work, experiments)


def _longest(experiment: Experiment, target: Hardware, budget_bytes: int) -> Longest:
    prepared = experiment.read_corpus()

    def with_length(length: int) -> Experiment:
        return Experiment(experiment.settings.model_copy(update={"sequence_length": length}))

    def predicted(length: int) -> Prediction:
        rows = OfLength(prepared.train, length)
        example = replace(prepared, train=rows, held_out=rows)
        return predict(with_length(length), target, example, budget_bytes=budget_bytes)

    lengths = range(MULTIPLE, largest_length(experiment) + 1, MULTIPLE)
    supported = [length for length in lengths if with_length(length).unsupported(target) is None]
    if not supported:
        raise InvalidInputError(str(with_length(lengths[-1]).unsupported(target)))
    length, found, next_peak_bytes = largest_fitting(supported, predicted, budget_bytes)
    return Longest(with_length(length), found, next_peak_bytes)


def largest_fitting(
    lengths: list[int], predicted: Callable[[int], Prediction], budget_bytes: int
) -> tuple[int, Prediction, int | None]:
    """Return the largest length that fits, its prediction, and the peak of the next one, which does not fit.

    The last is None if the largest fits, or if the smallest does not, which is then returned. Memory grows with the
    length, most of it in proportion: the next guess is where a straight line meets the budget, or the middle.
    """
    low, high = 0, len(lengths) - 1
    fitting = predicted(lengths[low])
    if not fitting.fits(budget_bytes):
        return lengths[low], fitting, None
    beyond = fitting if high == low else predicted(lengths[high])
    if beyond.fits(budget_bytes):
        return lengths[high], beyond, None
    is_middle = False
    while high - low > 1:
        share = 0.5 if is_middle else _share(fitting.peak_bytes, beyond.peak_bytes, budget_bytes)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        width = high - low
        guess = predicted(lengths[middle])
        if guess.fits(budget_bytes):
            low, fitting = middle, guess
        else:
            high, beyond = middle, guess
        is_middle = not is_middle and high - low > width / 2
    return lengths[low], fitting, beyond.peak_bytes


def _share(low_bytes: int, high_bytes: int, budget_bytes: int) -> float:
    """Return how far the budget is from the first peak to the second, as a share."""
    return (budget_bytes - low_bytes) / (high_bytes - low_bytes) if high_bytes > low_bytes else 0.5
