"""The configurations that may be the fastest within a budget, simulated in the order of their expected speed.

Each round simulates those that are expected to be the fastest of what may fit (expectation.py), until all others are
expected to be slower than the best one found; as long as none fits, the leanest. Expectations err where values act on
each other: last come those that differ from the best one in one value, unless they are expected to be far off.
N counts configurations.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.planning.expectation import SIZE, Expectation
from pipeline.planning.step_time import CostPrior, estimated
from pipeline.prediction.predict_all import predict_each
from pipeline.prediction.prediction import Prediction

FEWEST = 48
"""Configurations that are all simulated, where there are no more."""
ROUND_PER_CORE = 1
"""Configurations of a round for each core."""
MAY_FIT = 1.15
"""Expected share of the budget up to which a configuration is simulated: expectations err."""
MAY_FIT_BESIDE, MAY_BE_FASTER_BESIDE = 2.0, 1.5
"""The same of one that differs in one value from the best, and its expected share of the best one's time."""
NUM_FRUITLESS = 20
"""Configurations, the last of them expected to be the leanest, after which only those beside the leanest follow."""
Outcome = Prediction | InvalidInputError


def predict_promising(
    experiments: Sequence[Experiment],
    choices: Sequence[Choice],
    target: Hardware,
    budget_bytes: int,
    prior: CostPrior,
) -> Generator[tuple[int, Outcome], None, None]:
    """Yield the number of a configuration and its prediction, or why it has none, until the fastest one is known.

    Of a small space all are predicted.
    """
    if len(experiments) <= FEWEST:
        yield from predict_each(experiments, target, budget_bytes=budget_bytes)
        return
    known: dict[int, Outcome] = {}
    space = _Space(experiments, choices, budget_bytes, prior)
    wanted = space.first()
    while wanted:
        with closing(
            predict_each([experiments[number] for number in wanted], target, budget_bytes=budget_bytes)
        ) as outcomes:
            for place, outcome in outcomes:
                known[wanted[place]] = outcome
                yield wanted[place], outcome
        if len(known) == len(experiments) or space.is_hopeless(known):
            return
        wanted = space.next(known)


class _Space:
    """The configurations with what is expected of them."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        choices: Sequence[Choice],
        budget_bytes: int,
        prior: CostPrior,
    ) -> None:
        self._experiments, self._choices = experiments, choices
        self._budget_bytes, self._prior = budget_bytes, prior
        self._expectation = Expectation(choices, [one.micro_batch_size for one in experiments])

    def first(self) -> list[int]:
        """Return those that tell most of the others."""
        return self._expectation.first()

    def best(self, known: Mapping[int, Outcome]) -> int | None:
        """Return the number of the fastest configuration that fits, of several the leanest, else of the leanest."""
        predictions = {number: one for number, one in known.items() if isinstance(one, Prediction)}

        def order(number: int) -> tuple[bool, float, int]:
            fits = predictions[number].fits(self._budget_bytes)
            return (not fits, self._seconds(number, known) if fits else 0.0, predictions[number].smallest_budget_bytes)

        return min(predictions, key=order, default=None)

    def is_hopeless(self, known: Mapping[int, Outcome]) -> bool:
        """Whether the parameters, which no value of a dimension changes, exceed the budget."""
        breakdowns = [one.breakdown for one in known.values() if isinstance(one, Prediction)]
        parameters = {one.category_bytes.get("parameters", 0) for one in breakdowns if one is not None}
        return len(parameters) == 1 and min(parameters) > self._budget_bytes

    def next(self, known: Mapping[int, Outcome]) -> list[int]:
        """Return the numbers of the configurations of the next round; none if the fastest one is known."""
        predictions = {number: one for number, one in known.items() if isinstance(one, Prediction)}
        left = np.array([n for n in range(len(self._choices)) if n not in known and not self._is_ruled_out(n, known)])
        best, num_in_round = self.best(known), ROUND_PER_CORE * num_cores()
        if best is None or not len(left):
            return []
        seconds = {number: math.log(self._seconds(number, known)) for number in predictions}
        peaks = {number: one.smallest_budget_bytes / self._budget_bytes for number, one in predictions.items()}
        seconds_N = np.exp(self._expectation.of_all(seconds))[left]
        peaks_N = self._expectation.of_all(peaks)[left]
        if not predictions[best].fits(self._budget_bytes):
            is_wanted = np.full(len(left), True) if len(known) < NUM_FRUITLESS else self._is_beside_leanest(known, left)
            return [int(number) for number in left[is_wanted][np.argsort(peaks_N[is_wanted])][:num_in_round]]
        limit = self._seconds(best, known)
        is_wanted = (peaks_N <= MAY_FIT) & (seconds_N < limit)
        if not is_wanted.any():
            is_wanted = (
                self._is_beside(best, left) & (peaks_N <= MAY_FIT_BESIDE) & (seconds_N < MAY_BE_FASTER_BESIDE * limit)
            )
        return [int(number) for number in left[is_wanted][np.argsort(seconds_N[is_wanted])][:num_in_round]]

    def _is_beside_leanest(self, known: Mapping[int, Outcome], others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the others differ in one value from the leanest with accumulation, or from that without.

        What makes the one lean does not the other: without accumulation no gradients wait for the next micro-batch.
        """
        is_wanted = np.full(len(others), False)
        for accumulates in (False, True):
            same = {n: one for n, one in known.items() if (self._experiments[n].accumulation_steps > 1) == accumulates}
            leanest = self.best(same)
            if leanest is not None:
                is_wanted |= self._is_beside(leanest, others)
        return is_wanted

    def _is_beside(self, number: int, others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the others differ from a configuration in one value."""
        own = self._choices[number].items()
        num_other = [sum(self._choices[other][name] != value for name, value in own) for other in others]
        return np.array([num == 1 for num in num_other])

    def _seconds(self, number: int, known: Mapping[int, Outcome]) -> float:
        prediction = known[number]
        assert isinstance(prediction, Prediction)
        num_passes = self._experiments[number].accumulation_steps
        return estimated(prediction, num_passes, self._prior).seconds / prediction.num_tokens

    def _is_ruled_out(self, number: int, known: Mapping[int, Outcome]) -> bool:
        """Whether the same configuration with a smaller micro-batch does not fit, and both accumulate gradients.

        Without accumulation no gradients wait for the next micro-batch while a forward pass makes its activations.
        """
        choice, size = self._choices[number], self._experiments[number].micro_batch_size
        return self._experiments[number].accumulation_steps > 1 and any(
            isinstance(one, Prediction)
            and one.micro_batch_size < size
            and not one.fits(self._budget_bytes)
            and all(self._choices[other][name] == value for name, value in choice.items() if name != SIZE)
            for other, one in known.items()
        )
