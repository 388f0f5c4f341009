"""The configurations that may be the fastest within a budget, simulated in the order of their expected speed.

What a few configurations need tells what the others are expected to: the logarithm of a step's time is a sum over the
values of the dimensions, and so is the peak, in proportion to the micro-batch size. Each round simulates those that are
expected to be the fastest of what may fit, until all others are expected to be slower than the best one found. N counts
configurations, F features.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.memory.device import num_cores
from pipeline.prediction.predict_all import predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.prediction.step_time import CostPrior, estimated

SIZE = "micro_batch_size"
FEWEST = 48
"""Configurations that are all simulated, where there are no more."""
ROUND_PER_CORE = 4
"""Configurations of a round for each core."""
BUSY_SIZE = 8
"""Sequences of a micro-batch that keep a device busy: at most so many are in the first configurations."""
MAY_FIT = 1.15
"""Expected share of the budget up to which a configuration is simulated: expectations err."""
NUM_FRUITLESS_ROUNDS = 3
"""Rounds of the smallest expected peaks after which nothing is taken to fit."""
RIDGE = 1e-3
Outcome = Prediction | InvalidInputError
Vector = NDArray[np.float64]


def predict_promising(
    experiments: Sequence[Experiment],
    choices: Sequence[Choice],
    target: Hardware,
    budget_bytes: int,
    prior: CostPrior,
    slower: float = 0.0,
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield the number of a configuration and its prediction, or why it has none, until the fastest one is known.

    Those go on to be predicted that are expected to take up to `slower` more time than the fastest, as a share of it.
    Of a small space, or on a CPU, all are predicted.
    """
    if target.kind != "cuda" or len(experiments) <= FEWEST:
        yield from predict_each(experiments, target, budget_bytes=budget_bytes)
        return
    known: dict[int, Outcome] = {}
    space = _Space(experiments, choices, budget_bytes, prior, slower)
    wanted, num_fruitless = space.first(), 0
    while wanted:
        with closing(
            predict_each([experiments[number] for number in wanted], target, budget_bytes=budget_bytes)
        ) as outcomes:
            for place, outcome in outcomes:
                known[wanted[place]] = outcome
                yield wanted[place], outcome
        if len(known) == len(experiments):
            return
        fits = space.best(known) is not None
        num_fruitless = 0 if fits else num_fruitless + 1
        wanted = [] if num_fruitless > NUM_FRUITLESS_ROUNDS else space.next(known)


class _Space:
    """The configurations with what is expected of them."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        choices: Sequence[Choice],
        budget_bytes: int,
        prior: CostPrior,
        slower: float,
    ) -> None:
        self._experiments, self._choices = experiments, choices
        self._budget_bytes, self._prior, self._slower = budget_bytes, prior, slower
        sizes_N1 = np.array([[one.micro_batch_size] for one in experiments], dtype=np.float64)
        names = {name: list(dict.fromkeys(choice[name] for choice in choices)) for name in choices[0]}
        is_value_NF = np.array(
            [[float(choice[name] == value) for name, values in names.items() for value in values] for choice in choices]
        )
        self._values = names
        self._of_time_NF = np.hstack([np.ones_like(sizes_N1), is_value_NF, 1 / sizes_N1, is_value_NF / sizes_N1])
        self._of_memory_NF = np.hstack([self._of_time_NF, is_value_NF * sizes_N1 / sizes_N1.max()])

    def first(self) -> list[int]:
        """Return one configuration, and one for each value of each dimension that is otherwise like it.

        Its micro-batch is one that keeps a device busy: with a smaller one the host sets the time, whatever a value
        saves on the device.
        """
        sizes = [one.micro_batch_size for one in self._experiments]
        busy = max((size for size in sizes if size <= BUSY_SIZE), default=min(sizes))
        first = self._choices[sizes.index(busy)]

        def likest(name: str, value: object) -> int:
            wanted = {**first, name: value}
            own = (number for number, choice in enumerate(self._choices) if choice[name] == value)
            return max(own, key=lambda number: sum(self._choices[number][each] == wanted[each] for each in wanted))

        likes = (likest(name, value) for name, values in self._values.items() for value in values)
        return list(dict.fromkeys([sizes.index(busy), *likes]))

    def best(self, known: Mapping[int, Outcome]) -> int | None:
        """Return the number of the fastest configuration that fits; None if none of them does."""
        fitting = [n for n, one in known.items() if isinstance(one, Prediction) and one.fits(self._budget_bytes)]
        return min(fitting, key=lambda number: self._seconds(number, known), default=None)

    def next(self, known: Mapping[int, Outcome]) -> list[int]:
        """Return the numbers of the configurations of the next round; none if the fastest one is known."""
        predictions = {number: one for number, one in known.items() if isinstance(one, Prediction)}
        left = np.array([n for n in range(len(self._choices)) if n not in known and not self._is_ruled_out(n, known)])
        if not predictions or not len(left):
            return []
        numbers = list(predictions)
        seconds = np.array([self._seconds(number, known) for number in numbers])
        peaks = np.array([float(predictions[number].smallest_budget_bytes) for number in numbers])
        seconds_N = np.exp(_fitted(self._of_time_NF, numbers, np.log(seconds)))[left]
        peaks_N = _fitted(self._of_memory_NF, numbers, peaks / self._budget_bytes)[left]
        best, num_in_round = self.best(known), ROUND_PER_CORE * num_cores()
        if best is None:
            return [int(number) for number in left[np.argsort(peaks_N)][:num_in_round]]
        limit = (1 + self._slower) * self._seconds(best, known)
        is_wanted = (peaks_N <= MAY_FIT) & (seconds_N < limit)
        return [int(number) for number in left[is_wanted][np.argsort(seconds_N[is_wanted])][:num_in_round]]

    def _seconds(self, number: int, known: Mapping[int, Outcome]) -> float:
        prediction = known[number]
        assert isinstance(prediction, Prediction)
        num_passes = self._experiments[number].accumulation_steps
        return estimated(prediction, num_passes, self._prior).seconds / prediction.num_tokens

    def _is_ruled_out(self, number: int, known: Mapping[int, Outcome]) -> bool:
        """Whether the same configuration with a smaller micro-batch does not fit."""
        choice, size = self._choices[number], self._experiments[number].micro_batch_size
        return any(
            isinstance(one, Prediction)
            and one.micro_batch_size < size
            and not one.fits(self._budget_bytes)
            and all(self._choices[other][name] == value for name, value in choice.items() if name != SIZE)
            for other, one in known.items()
        )


def _fitted(features_NF: Vector, numbers: Sequence[int], values: Vector) -> Vector:
    """Return the values of all configurations by a linear model of the known ones; those are exact where it can be."""
    own = features_NF[list(numbers)]
    inverse = own.T @ own + RIDGE * np.eye(own.shape[1])
    result: Vector = features_NF @ np.linalg.solve(inverse, own.T @ values)
    return result
