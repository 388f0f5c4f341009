"""One search replayed on a table: by the predictive sampler, by one of Optuna's, or by a common heuristic."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna

from pipeline.config.space import Choice, Space
from pipeline.searching.acquisition import Measurements, Rules, evaluate
from pipeline.searching.judge import CONSTRAINT
from pipeline.searching.optuna_samplers import choose, distributions_of
from pipeline.searching.settings import SearchSettings
from pipeline.searching.trial_length import TrialLength
from replay.table import WARMUP_STEPS, Entry, read

NUM_TRIALS = int(SearchSettings.model_fields["num_trials"].default)
PRECISION_PERCENT = float(SearchSettings.model_fields["precision_percent"].default)
FAR_APART = 100_003
"""Factor between the seeds of two searches, since the next trial of a search takes the next seed."""
NEAR = 0.02
"""Fraction of its time by which an incumbent may be slower than the best to count as found."""
OPTUNAS = ("tpe", "gp", "random", "brute", "nsga2")
HABITS = {
    f"doubling, {precision}{', checkpointed' if policy != 'none' else ''}": (policy, precision)
    for precision in ("fp32", "bf16")
    for policy in ("none", "every_layer")
}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The result of one search."""

    sampler: str
    budget_bytes: int
    seed: int
    trials_to_near: int | None
    """Trials until the incumbent was near the optimum, all counted; None where it never was."""
    seconds_to_near: float | None
    trials: int
    """All trials, where the sampler ends by itself."""
    seconds: float
    over_budget: int
    distance: float
    """Fraction by which the last incumbent is slower than the optimum."""
    bound: float | None
    """The bound that the search states; None where it states none."""
    certificate_holds: bool | None
    """Whether the optimum lies within that bound."""


class Search:
    """A search that is being replayed."""

    def __init__(self, entries: Sequence[Entry], sampler: str, budget_bytes: int, seed: int) -> None:
        self.entries, self.sampler, self.budget_bytes, self.seed = entries, sampler, budget_bytes, seed
        self.measured: dict[int, float] = {}
        self.repeated = set[int]()
        self.confirmed = set[int]()
        self.trials = 0
        self.seconds = 0.0
        self._random = random.Random(f"{sampler} {budget_bytes} {seed}")  # noqa: S311  nothing secret
        self._optimum = min(entry.seconds for entry in entries if entry.peak_bytes <= budget_bytes)
        self._near: tuple[int, float] | None = None

    @property
    def over_budget(self) -> list[int]:
        """Return the numbers of those measured that do not fit."""
        return [number for number in self.measured if self.entries[number].peak_bytes > self.budget_bytes]

    @property
    def incumbent(self) -> int | None:
        """Return the number of the fastest measured that fits."""
        fitting = [number for number in self.measured if self.entries[number].peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda number: self.measured[number], default=None)

    @property
    def is_near(self) -> bool:
        """Whether the incumbent has been near the optimum."""
        return self._near is not None

    def measure(self, number: int) -> None:
        """Run a trial; of two of a configuration the faster counts."""
        run, best = self._random.choice(self.entries[number].runs), self.incumbent
        enough = TrialLength(WARMUP_STEPS, PRECISION_PERCENT, None if best is None else self.measured[best])
        lengths = range(1, len(run.seconds_of_steps) + 1)
        length = next((n for n in lengths if enough(run.seconds_of_steps[:n])), lengths[-1])
        steps = run.seconds_of_steps[:length]
        median_seconds = statistics.median(steps[WARMUP_STEPS:])
        if number in self.measured:
            self.repeated.add(number)
        self.measured[number] = min(median_seconds, self.measured.get(number, median_seconds))
        self.trials += 1
        self.seconds += run.seconds_of_start + sum(steps)
        best = self.incumbent
        if self._near is None and best is not None and self.entries[best].seconds <= self._optimum * (1 + NEAR):
            self._near = (self.trials, self.seconds)

    def confirm(self) -> bool:
        """Measure the fastest again, as the verification does, until the fastest by both measurements is confirmed.

        Return whether anything was measured.
        """
        num_confirmed = len(self.confirmed)
        while (best := self.incumbent) is not None and best not in self.confirmed:
            run = self._random.choice(self.entries[best].runs)
            self.measured[best] = math.sqrt(self.measured[best] * run.seconds)
            self.seconds += run.seconds_of_start + sum(run.seconds_of_steps)
            self.confirmed.add(best)
        return len(self.confirmed) > num_confirmed

    @property
    def measurements(self) -> Measurements:
        """Return what has been measured."""
        tokens = self.entries[0].candidate.num_tokens
        return Measurements(
            log_seconds={number: math.log(seconds / tokens) for number, seconds in self.measured.items()},
            peak_bytes={number: self.entries[number].peak_bytes for number in self.measured},
            over_budget=frozenset(self.over_budget),
            failed=frozenset(),
            running=frozenset(),
            repeated=frozenset(self.repeated | self.confirmed),
        )

    def result(self, bound: float | None = None) -> Replayed:
        """Return the result; `bound` is what the search states at its end."""
        best = self.incumbent
        distance = math.inf if best is None else self.entries[best].seconds / self._optimum - 1
        return Replayed(
            sampler=self.sampler,
            budget_bytes=self.budget_bytes,
            seed=self.seed,
            trials_to_near=self._near[0] if self._near else None,
            seconds_to_near=self._near[1] if self._near else None,
            trials=self.trials,
            seconds=self.seconds,
            over_budget=len(self.over_budget),
            distance=distance,
            bound=bound,
            certificate_holds=None if bound is None or best is None else 1 - 1 / (1 + distance) <= bound,
        )


def predictive(search: Search) -> Replayed:
    """Replay the predictive sampler until it ends, and its answer was confirmed."""
    candidates = [entry.candidate for entry in search.entries]
    rules = Rules(budget_bytes=search.budget_bytes)
    while True:
        acquisition = evaluate(candidates, search.measurements, rules)
        following = acquisition.next if acquisition.outlier is None else acquisition.outlier
        if following is not None and acquisition.is_adequate and search.trials < NUM_TRIALS:
            search.measure(following)
        elif not search.confirm():
            break
    has_bound = acquisition.bound is not None and acquisition.is_adequate
    return search.result(max(acquisition.bound, rules.gap) if has_bound else None)


def of_optuna(search: Search) -> Replayed:
    """Replay one of Optuna's samplers, with the peak as a constraint in bytes, until it is near the optimum."""
    choices: list[Choice] = [entry.candidate.choice for entry in search.entries]
    space = Space({name: tuple(dict.fromkeys(choice[name] for choice in choices)) for name in choices[0]})
    numbers = {tuple(choice.values()): number for number, choice in enumerate(choices)}
    study = optuna.create_study(direction="maximize")
    while not search.is_near:
        taken = [choices[number] for number in search.measured]
        choice = choose(choices, space, study.trials, taken, ("maximize",), search.sampler, search.seed * FAR_APART)
        if choice is None:
            break
        number = numbers[tuple(choice.values())]
        search.measure(number)
        study.enqueue_trial(choice)
        trial = study.ask(distributions_of(space))
        trial.set_constraint(CONSTRAINT, search.entries[number].peak_bytes - search.budget_bytes)
        study.tell(trial, search.entries[number].candidate.num_tokens / search.measured[number])
    return search.result()


def by_habit(search: Search) -> Replayed:
    """Replay a heuristic: double the micro-batch until it does not fit, then accumulate with the one before."""
    policy, precision = HABITS[search.sampler]
    size = 1
    for number, entry in enumerate(search.entries):
        choice = entry.candidate.choice
        is_habit = entry.is_plain and (choice["checkpointing"], choice["precision"]) == (policy, precision)
        if is_habit and choice["micro_batch_size"] == size:
            search.measure(number)
            size *= 2
            if search.over_budget:
                break
    return search.result()


REPLAYS: Mapping[str, Callable[[Search], Replayed]] = {
    "predictive": predictive,
    **dict.fromkeys(OPTUNAS, of_optuna),
    **dict.fromkeys(HABITS, by_habit),
}


def replay(file: Path, task: tuple[str, int, int]) -> Replayed:
    """Replay one search: (sampler, budget in bytes, seed)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return REPLAYS[task[0]](Search(read(file), *task))
