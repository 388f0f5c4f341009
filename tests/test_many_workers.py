"""Many workers of a made-up machine, whose trials only sleep: the real loop, sampler and PostgreSQL storage."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from conftest import TINY
from optuna.trial import TrialState
from test_acquisition import BATCH, POLICIES, PRECISIONS, SIZES, TOKENS, made_up, modelled

from pipeline.base.results import Outcome, Result
from pipeline.base.units import MIB
from pipeline.config.command import Runnable
from pipeline.config.space import Choice
from pipeline.runtime.observer import Observer
from pipeline.runtime.run import execute
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate
from pipeline.searching.certificate import REPEATED_GAPS
from pipeline.searching.experiment_problem import ExperimentProblem, make_experiment_problem
from pipeline.searching.loop import Search, SearchObserver, run_trials
from pipeline.searching.proposals import PredictiveProposer
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.storage import open_storage
from pipeline.searching.study import StoredStudy
from pipeline.searching.trial_record import CONSTRAINT
from pipeline.searching.trials import Proposal, Trial, label

pytestmark = pytest.mark.slow
NUM_WORKERS = 64
LEAST_AT_ONCE = 8
"""Trials that run at the same time at least; the sampler lets other workers wait for their results."""
BUDGET_MIB, GAP = 600, 0.001
NOISE = 0.1
"""How far the speed of a configuration is from what the time model says of the made-up machine, at most."""
OPTIMIZERS = {"adamw": 1.0, "sgd": 0.9, "adafactor": 1.2}
"""How much each makes an update of the made-up machine longer."""
SECONDS_OF_A_TRIAL = 2.5
NUM_LISTED = 8
"""Trials of the fixed list."""
SPEEDUP = 3.0
"""How much sooner four workers end at least: 3.6 where nothing else runs, less where the servers wait for a core."""


@dataclass(frozen=True)
class SleepingSearch(Search):
    """A search whose trials sleep, and have the metrics of a made-up machine."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each configuration sleeps, by its label."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def run(
        self, name: str, folder: str, experiment: Runnable, labels: dict[str, str], *_: Any
    ) -> tuple[Result, dict[str, float]]:
        variant = labels["variant"]
        time.sleep(self.seconds[variant])
        result = Result(outcome=Outcome.OK, seconds_total=1.0)
        return result, dict(self.metrics[variant])


@dataclass
class Repeats(SearchObserver):
    """Counts the repeats that are proposed since the two fastest may be the wrong way round, by label."""

    proposed_again: Counter[str]

    def proposed(self, proposal: Proposal) -> None:
        if proposal.is_repeat and proposal.bound is not None and proposal.bound > REPEATED_GAPS * GAP:
            self.proposed_again[label(proposal.choice)] += 1


@dataclass
class Listed:
    """Proposes these configurations in their order, and no more."""

    left: list[Choice]

    def next(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
        return Proposal(self.left.pop(0)) if self.left else None

    def baseline(self, rows: Sequence[Trial], answer: Choice) -> Choice | None:
        return None

    def certificate(self, rows: Sequence[Trial], extra: Sequence[Trial] = ()) -> None:
        return None


@pytest.fixture(scope="module")
def problem() -> ExperimentProblem:
    space = {
        "micro_batch_size": list(SIZES),
        "checkpointing": list(POLICIES),
        "precision": list(PRECISIONS),
        "optimizer": list(OPTIMIZERS),
    }
    settings = {
        "budget": f"{BUDGET_MIB}MiB",
        "effective_batch_size": BATCH,
        "num_trials": 300,
        "mathematics": "different",
    }
    return make_experiment_problem({**TINY, **settings, "space": space})


def candidate(choice: Mapping[str, Any]) -> Candidate:
    """Return the made-up predictions of a configuration."""
    one = made_up(*(choice[name] for name in ("micro_batch_size", "checkpointing", "precision")))
    return replace(one, choice=dict(choice), update_work=one.update_work * OPTIMIZERS[choice["optimizer"]])


def sampler_of(problem: ExperimentProblem) -> PredictiveSampler:
    """Return the sampler of the made-up machine, which ends late."""
    candidates = [candidate(choice) for choice in problem.space.choices]
    return PredictiveSampler(candidates, Rules(budget_bytes=BUDGET_MIB * MIB, gap=GAP))


def search_of(
    problem: ExperimentProblem,
    database_url: str,
    name: str,
    num_workers: int,
    observer: SearchObserver | None = None,
    **made_up: Any,
) -> SleepingSearch:
    """Return one process's part of the search of this study, with so many workers, whose executors are not called."""
    study = StoredStudy(database_url, name, problem.directions, {})
    proposer = PredictiveProposer(problem, study, sampler_of(problem))
    events = observer or SearchObserver()
    executors = [execute] * num_workers
    return SleepingSearch(problem, study, proposer, Path("nowhere"), Observer, events, executors, **made_up)


def test_many_workers_keep_the_study_consistent(problem: ExperimentProblem, database_url: str) -> None:
    """Two processes, here with connections of their own, have half of the workers each.

    A configuration is repeated once, and again only while the two fastest may be the wrong way round.
    """
    random, seconds_of = np.random.default_rng(0), modelled()
    candidates = {label(choice): candidate(choice) for choice in problem.space.choices}
    speeds = {
        name: BATCH * TOKENS / seconds_of(one) * float(random.uniform(1 - NOISE, 1 + NOISE))
        for name, one in candidates.items()
    }
    peaks = {name: (one.predicted_bytes or 0) / MIB for name, one in candidates.items()}
    made_up = {
        "seconds": {name: float(random.uniform(6, 10)) for name in candidates},
        "metrics": {
            name: {"tokens_per_second": speeds[name], "peak_allocated_mib": peaks[name]} for name in candidates
        },
    }
    repeats = Repeats(Counter())
    with ThreadPoolExecutor(2) as pool:
        parts = [search_of(problem, database_url, "many", NUM_WORKERS // 2, repeats, **made_up) for _ in range(2)]
        for part in [pool.submit(run_trials, part, math.inf) for part in parts]:
            part.result()
    trials = optuna.load_study(storage=open_storage(database_url), study_name="many").trials
    assert all(trial.state.is_finished() for trial in trials)
    measured = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    others = [trial for trial in trials if trial.state is not TrialState.COMPLETE]
    assert {trial.user_attrs["outcome"] for trial in others} <= {"interrupted"}, "two workers have queued the same"
    times_measured = Counter(label(trial.params) for trial in measured)
    again = Counter(label(trial.params) for trial in measured if trial.user_attrs["is_repeat"])
    assert all(count == 1 + again[name] <= 2 + repeats.proposed_again[name] for name, count in times_measured.items())
    ends: dict[str, Any] = {}
    for trial in sorted(measured, key=lambda trial: trial.datetime_start):
        name = label(trial.params)
        assert name not in ends or ends[name] <= trial.datetime_start, f"two workers measure {name} at once"
        ends[name] = trial.datetime_complete
    spans = [(trial.datetime_start, trial.datetime_complete) for trial in measured]
    assert max(sum(began <= start < ended for began, ended in spans) for start, _ in spans) >= LEAST_AT_ONCE
    acquisition = sampler_of(problem).evaluate(parts[0].study.optuna_study)
    assert acquisition.next is acquisition.again is None and not acquisition.is_waiting
    fitting = [speed for name, speed in speeds.items() if peaks[name] <= BUDGET_MIB]
    answer = max(trial.values[0] for trial in measured if trial.constraints[CONSTRAINT] <= 0)
    assert answer >= (1 - NOISE) * max(fitting)


@pytest.mark.long
def test_four_workers_need_little_more_than_a_quarter_of_the_time_of_one(
    problem: ExperimentProblem, database_url: str
) -> None:
    """From the start of the first trial of a fixed list to the end of the last one."""
    listed = [choice for choice in problem.space.choices if choice["optimizer"] == "adamw"][:NUM_LISTED]
    names = [label(choice) for choice in listed]
    metrics = {name: {"tokens_per_second": 1.0, "peak_allocated_mib": 1.0} for name in names}

    def seconds_with(count: int) -> float:
        seconds = dict.fromkeys(names, SECONDS_OF_A_TRIAL)
        made = search_of(problem, database_url, f"{count} workers", count, seconds=seconds, metrics=metrics)
        run_trials(replace(made, proposer=Listed(list(listed))), math.inf)
        trials = optuna.load_study(storage=open_storage(database_url), study_name=f"{count} workers").trials
        assert [trial.state for trial in trials] == [TrialState.COMPLETE] * NUM_LISTED
        assert {label(trial.params) for trial in trials} == set(names)
        began, ended = (min(t.datetime_start for t in trials), max(t.datetime_complete for t in trials))
        return (ended - began).total_seconds()

    speedup = seconds_with(1) / seconds_with(4)
    assert speedup >= SPEEDUP
