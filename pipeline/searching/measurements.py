"""The measurements of a search: the runs of each configuration, and what they came to."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from pipeline.config.space import Choice, Value
from pipeline.searching.gaussian import means
from pipeline.training.timing import counting

Item = tuple[str, Value]
"""A dimension and a value of it."""
FAILURES_OF_A_VALUE = 2
"""Configurations that a value has to fail in before all others that have it are left out."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements so far, by index of the candidate."""

    runs: Mapping[int, Sequence[float]]
    """Logarithm of the seconds per token of each run that completed."""
    peak_bytes: Mapping[int, float]
    """Peaks of the candidates that completed, whether or not they fit."""
    peak_lower_bounds: Mapping[int, float] = field(default_factory=dict)
    """Lower bounds of the peaks of candidates that ran out of memory: reserved bytes plus the failed allocation."""
    over_budget: frozenset[int]
    failed: frozenset[int]
    """Candidates that failed for another reason: neither time nor memory is known."""
    running: frozenset[int]
    with_failed_run: frozenset[int] = frozenset()
    """The candidates of which a run did not complete, whether or not another one did."""

    @cached_property
    def counting_runs(self) -> Mapping[int, Sequence[float]]:
        """The runs that count of each candidate that completed."""
        return {number: counting(runs) for number, runs in self.runs.items()}

    @cached_property
    def log_seconds(self) -> Mapping[int, float]:
        """Logarithm of the seconds per token of each candidate that completed: the mean of its runs that count."""
        return means(self.counting_runs)

    @cached_property
    def fitting(self) -> frozenset[int]:
        """The candidates that completed and fit."""
        return frozenset(self.runs) - self.over_budget

    @cached_property
    def incumbent(self) -> int | None:
        """The fastest candidate that fits."""
        return min(self.fitting, key=self.log_seconds.__getitem__, default=None)

    @cached_property
    def repeated(self) -> frozenset[int]:
        """The candidates that completed and have another run, whether or not it completed."""
        return frozenset(number for number, own in self.runs.items() if len(own) > 1 or number in self.with_failed_run)

    @property
    def ended(self) -> frozenset[int]:
        """The candidates with a trial that has ended."""
        return frozenset(self.runs) | self.over_budget | self.failed

    @property
    def taken(self) -> frozenset[int]:
        """The candidates that are not proposed any more."""
        return self.ended | self.running

    def with_failing_value(self, choices: Sequence[Choice]) -> dict[int, Item]:
        """Return the candidates that have a value which fails, each with its dimension and that value.

        A value fails if no configuration that has it completed, and at least FAILURES_OF_A_VALUE failed that have no
        other such value in common. `choices` are those of all candidates.
        """
        completed = {item for number in self.runs for item in choices[number].items()}
        unexplained = [choices[number].items() - completed for number in self.failed.difference(self.runs)]
        fails = set[Item]()
        while (item := _explains_most(unexplained)) is not None:
            fails.add(item)
            unexplained = [items for items in unexplained if item not in items]
        found = ((number, fails & choice.items()) for number, choice in enumerate(choices))
        return {number: min(items, key=str) for number, items in found if items}

    def as_expected(self, log_seconds: Mapping[int, float], feasible: frozenset[int]) -> "Measurements":
        """Return the measurements as if each running trial had ended in its expected time, and fitted if feasible.

        Ginsbourger, Le Riche and Carraro, Kriging Is Well-Suited to Parallelize Optimization, 2010: Kriging believer.
        """
        if not self.running:
            return self
        expected = {number: [log_seconds[number]] for number in self.running}
        return replace(
            self,
            runs={**expected, **self.runs},
            over_budget=self.over_budget | (self.running - feasible - frozenset(self.runs)),
            running=frozenset(),
        )


def _explains_most(failures: Sequence[Set[Item]]) -> Item | None:
    """Return the value that most failures have, and nothing else in common; None if too few do."""
    for item, num_failed in Counter(chain.from_iterable(failures)).most_common():
        in_common = set.intersection(*(set(items) for items in failures if item in items))
        if num_failed >= FAILURES_OF_A_VALUE and in_common == {item}:
            return item
    return None
