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

from pipeline.base.contracts import Hardware
from pipeline.base.processes import num_cores
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice, Value, without_size
from pipeline.planning.expectation import Expectation
from pipeline.planning.step_time import CostPrior, estimated
from pipeline.prediction.predict import Predicted, predict_each
from pipeline.prediction.prediction import Prediction

FEWEST = 48
"""Configurations that are all simulated, where there are no more."""
MAY_FIT = 1.15
"""Expected share of the budget up to which a configuration is simulated: expectations err."""
MAY_FIT_BESIDE, MAY_BE_FASTER_BESIDE = 2.0, 1.5
"""The same of one that differs in one value from the best, and its expected share of the best one's time."""


def predict_promising(
    experiments: Sequence[Experiment],
    choices: Sequence[Choice],
    target: Hardware,
    budget_bytes: int,
    prior: CostPrior,
) -> Generator[tuple[int, Predicted], None, None]:
    """Yield the number of a configuration and its prediction, or why it has none, until the fastest one is known.

    Of a small space all are predicted.
    """
    if len(experiments) <= FEWEST:
        yield from predict_each(experiments, target, budget_bytes=budget_bytes)
        return
    known: dict[int, Predicted] = {}
    space = _Space(experiments, choices, budget_bytes, prior)
    wanted = space.expectation.first()
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
        self.expectation = Expectation(choices, [one.micro_batch_size for one in experiments])
        self._without_size = [without_size(choice) for choice in choices]
        self._accumulates = [one.accumulation_steps > 1 for one in experiments]

    def is_hopeless(self, known: Mapping[int, Predicted]) -> bool:
        """Whether the parameters, which no value of a dimension changes, exceed the budget."""
        breakdowns = [one.breakdown for one in known.values() if isinstance(one, Prediction)]
        parameters = {one.category_bytes.get("parameters", 0) for one in breakdowns if one is not None}
        return len(parameters) == 1 and min(parameters) > self._budget_bytes

    def next(self, known: Mapping[int, Predicted]) -> list[int]:
        """Return the numbers of the configurations of the next round; none if the fastest one is known."""
        predictions = {number: one for number, one in known.items() if isinstance(one, Prediction)}
        best, num_in_round = self._best(predictions), num_cores()
        ruled_out = self._ruled_out(predictions)
        left = np.array([n for n in range(len(self._choices)) if n not in known and n not in ruled_out])
        if best is None or not len(left):
            return []
        seconds = {number: math.log(self._seconds(number, one)) for number, one in predictions.items()}
        peaks = {number: one.smallest_budget_bytes / self._budget_bytes for number, one in predictions.items()}
        seconds_N = np.exp(self.expectation.of_all(seconds))[left]
        peaks_N = self.expectation.of_all(peaks)[left]
        if not predictions[best].fits(self._budget_bytes):
            is_wanted = np.isin(left, [*self.expectation.may_be_leanest(peaks, self._accumulates, len(known))])
            return [int(number) for number in left[is_wanted][np.argsort(peaks_N[is_wanted])][:num_in_round]]
        limit = self._seconds(best, predictions[best])
        is_wanted = (peaks_N <= MAY_FIT) & (seconds_N < limit)
        if not is_wanted.any():
            may_be_better = (peaks_N <= MAY_FIT_BESIDE) & (seconds_N < MAY_BE_FASTER_BESIDE * limit)
            is_wanted = np.isin(left, [*self.expectation.beside(best)]) & may_be_better
        return [int(number) for number in left[is_wanted][np.argsort(seconds_N[is_wanted])][:num_in_round]]

    def _best(self, predictions: Mapping[int, Prediction]) -> int | None:
        """Return the number of the fastest that fits, the leanest of several as fast; if none fits, of the leanest."""

        def order(number: int) -> tuple[bool, float, int]:
            one = predictions[number]
            fits = one.fits(self._budget_bytes)
            return (not fits, self._seconds(number, one) if fits else 0.0, one.smallest_budget_bytes)

        return min(predictions, key=order, default=None)

    def _seconds(self, number: int, prediction: Prediction) -> float:
        """Return the expected seconds of a token."""
        num_passes = self._experiments[number].accumulation_steps
        return estimated(prediction, num_passes, self._prior).seconds / prediction.num_tokens

    def _ruled_out(self, predictions: Mapping[int, Prediction]) -> set[int]:
        """Return those of which the same configuration with a smaller micro-batch does not fit, and both accumulate.

        Without accumulation no gradients wait for the next micro-batch while a forward pass makes its activations.
        """
        too_large: dict[tuple[tuple[str, Value], ...], int] = {}
        for number, one in predictions.items():
            if not one.fits(self._budget_bytes):
                others = self._without_size[number]
                too_large[others] = min(one.micro_batch_size, too_large.get(others, one.micro_batch_size))
        return {
            number
            for number, (others, one) in enumerate(zip(self._without_size, self._experiments, strict=True))
            if others in too_large and one.micro_batch_size > too_large[others] and self._accumulates[number]
        }
