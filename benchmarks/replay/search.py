"""One search replayed on a table: by the predictive sampler, by one of Optuna's, or by a common heuristic."""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import optuna

from pipeline.config.space import Choice, Space
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate
from pipeline.searching.certificate import stated
from pipeline.searching.measurements import Measurements
from pipeline.searching.optuna_samplers import choose, distributions_of
from pipeline.searching.sampler import PredictiveSampler, expectation_of
from pipeline.searching.settings import SearchSettings
from pipeline.searching.trial_length import PRECISION_PERCENT, TrialLength
from pipeline.searching.trial_record import CONSTRAINT
from replay.table import WARMUP_STEPS, Entry, Run, read

NUM_TRIALS = int(SearchSettings.model_fields["num_trials"].default)
NUM_PREDICTED_AT_ONCE = 8
"""As on two cores."""
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


class Started(NamedTuple):
    """A trial that was started; the one that ends first is the smallest."""

    at_seconds: float
    """When it ends."""
    trial: int
    number: int
    """Of its configuration."""
    seconds_of_steps: Sequence[float]


class Search:
    """A search that is being replayed."""

    def __init__(
        self, entries: Sequence[Entry], sampler: str, budget_bytes: int, seed: int, *, most_trials: float = math.inf
    ) -> None:
        self.entries, self.sampler, self.budget_bytes, self.seed = entries, sampler, budget_bytes, seed
        self.most_trials = most_trials
        """Trials after which one of Optuna's samplers is given up."""
        self.runs: dict[int, list[float]] = {}
        self.confirmed = set[int]()
        self.trials = 0
        self._tokens = entries[0].candidate.num_tokens
        self.seconds = 0.0
        self._random = random.Random(f"{sampler} {budget_bytes} {seed}")  # noqa: S311  nothing secret
        self._optimum = min(entry.seconds for entry in entries if entry.peak_bytes <= budget_bytes)
        self._drawn: dict[int, list[Run]] = {}
        self._started: list[Started] = []
        self._near: tuple[int, float] | None = None

    @property
    def measurements(self) -> Measurements:
        """Return what has been measured."""
        return Measurements(
            runs=self.runs,
            peak_bytes={number: self.entries[number].peak_bytes for number in self.runs},
            over_budget=frozenset(self.over_budget),
            failed=frozenset(),
            running=frozenset(one.number for one in self._started),
        )

    @property
    def num_running(self) -> int:
        """Return the number of trials that have not ended."""
        return len(self._started)

    @property
    def over_budget(self) -> list[int]:
        """Return the numbers of those measured that do not fit."""
        return [number for number in self.runs if self.entries[number].peak_bytes > self.budget_bytes]

    @property
    def is_near(self) -> bool:
        """Whether the incumbent has been near the optimum."""
        return self._near is not None

    def seconds_of(self, number: int) -> float:
        """Return the measured seconds per step of a configuration."""
        return math.exp(self.measurements.log_seconds[number]) * self._tokens

    def measure(self, number: int) -> None:
        """Run a trial."""
        self.start(number)
        self.finish()

    def start(self, number: int) -> None:
        """Start a trial."""
        run, best = self._draw(number), self.measurements.incumbent
        to_beat = None if best is None or number in self.runs else self.seconds_of(best)
        enough = TrialLength(WARMUP_STEPS, PRECISION_PERCENT, to_beat)
        lengths = range(1, len(run.seconds_of_steps) + 1)
        length = next((n for n in lengths if enough(run.seconds_of_steps[:n])), lengths[-1])
        steps = run.seconds_of_steps[:length]
        seconds = run.seconds_of_start + sum(steps)
        heappush(self._started, Started(self.seconds + seconds, self.trials, number, steps))
        self.trials += 1

    def finish(self) -> None:
        """Wait for the trial that ends first."""
        ended = heappop(self._started)
        self.seconds = ended.at_seconds
        self._add(ended.number, ended.seconds_of_steps)
        self._look()

    def confirm(self) -> bool:
        """Measure the fastest again, as the verification does, until the fastest by both measurements is confirmed.

        Return whether anything was measured.
        """
        num_confirmed = len(self.confirmed)
        while (best := self.measurements.incumbent) is not None and best not in self.confirmed:
            run = self._draw(best)
            self.seconds += run.seconds_of_start + sum(run.seconds_of_steps)
            self._add(best, run.seconds_of_steps)
            self.confirmed.add(best)
            self._look()
        return len(self.confirmed) > num_confirmed

    def _look(self) -> None:
        """Note if the incumbent is near the optimum for the first time."""
        best = self.measurements.incumbent
        if self._near is None and best is not None and self.entries[best].seconds <= self._optimum * (1 + NEAR):
            self._near = (self.trials, self.seconds)

    def _add(self, number: int, seconds_of_steps: Sequence[float]) -> None:
        median_seconds = statistics.median(seconds_of_steps[WARMUP_STEPS:])
        self.runs.setdefault(number, []).append(math.log(median_seconds / self._tokens))

    def _draw(self, number: int) -> Run:
        """Return one of a configuration's runs: one that was not drawn before, as long as there is one."""
        runs, drawn = self.entries[number].runs, self._drawn.setdefault(number, [])
        run = self._random.choice([one for one in runs if one not in drawn] or runs)
        drawn.append(run)
        return run

    def result(self, bound: float | None = None) -> Replayed:
        """Return the result; `bound` is what the search states at its end."""
        best = self.measurements.incumbent
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


def _sampler(search: Search, rules: Rules) -> PredictiveSampler:
    """Return the sampler that predicts on the way, as a search does."""
    predicted = {tuple(entry.candidate.choice.values()): entry.candidate for entry in search.entries}
    unpredicted = [
        replace(one, predicted_bytes=None, is_expected=True, is_work_known=False) for one in predicted.values()
    ]

    def predict(candidates: Sequence[Candidate]) -> list[Candidate]:
        return [predicted[tuple(one.choice.values())] for one in candidates]

    sampler = PredictiveSampler(unpredicted, rules, predict, NUM_PREDICTED_AT_ONCE)
    sampler.predict(expectation_of(unpredicted).first())
    return sampler


def predictive(search: Search) -> Replayed:
    """Replay the predictive sampler until it ends, and its answer was confirmed."""
    rules = Rules(budget_bytes=search.budget_bytes)
    sampler = _sampler(search, rules)
    while True:
        acquisition = sampler.evaluate_measured(search.measurements)
        following = acquisition.next if acquisition.again is None else acquisition.again
        if following is not None and acquisition.is_adequate and search.trials < NUM_TRIALS:
            search.measure(following)
        elif not search.confirm():
            break
    return search.result(stated(acquisition.bound, rules.gap) if acquisition.is_adequate else None)


def of_optuna(search: Search) -> Replayed:
    """Replay one of Optuna's samplers, with the peak as a constraint in bytes, until it is near or given up."""
    choices: list[Choice] = [entry.candidate.choice for entry in search.entries]
    space = Space({name: tuple(dict.fromkeys(choice[name] for choice in choices)) for name in choices[0]})
    numbers = {tuple(choice.values()): number for number, choice in enumerate(choices)}
    study = optuna.create_study(direction="maximize")
    while not search.is_near and search.trials < search.most_trials:
        taken = [choices[number] for number in search.runs]
        finished = study.get_trials(deepcopy=False)
        choice = choose(choices, space, finished, taken, ("maximize",), search.sampler, search.seed * FAR_APART)
        if choice is None:
            break
        number = numbers[tuple(choice.values())]
        search.measure(number)
        study.enqueue_trial(choice)
        trial = study.ask(distributions_of(space))
        trial.set_constraint(CONSTRAINT, search.entries[number].peak_bytes - search.budget_bytes)
        study.tell(trial, search.entries[number].candidate.num_tokens / search.seconds_of(number))
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


def replay(file: Path, most_trials: float, task: tuple[str, int, int]) -> Replayed:
    """Replay one search: (sampler, budget in bytes, seed)."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return REPLAYS[task[0]](Search(read(file), *task, most_trials=most_trials))
