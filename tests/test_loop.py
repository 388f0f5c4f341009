"""The loop of a search: trials, verification, and what follows when the two disagree."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from optuna.trial import FrozenTrial
from test_verification import rows_of, trained

from pipeline.base.results import Outcome, Result
from pipeline.config.experiment import Experiment
from pipeline.config.space import Choice
from pipeline.jobs.search import _findings
from pipeline.jobs.search_progress import SearchClock
from pipeline.runtime.observer import Observer
from pipeline.searching import loop
from pipeline.searching.experiment_problem import ExperimentProblem, make_experiment_problem
from pipeline.searching.loop import (
    Search,
    SearchObserver,
    findings_of,
    run_trials,
    search_and_verify,
    store_measurement,
)
from pipeline.searching.study import StoredStudy
from pipeline.searching.trial_record import judge
from pipeline.searching.trials import ANSWER, Proposal, Trial, label, speeds

SIZES = (1, 2, 4)


def choice_of(size: int) -> dict[str, Any]:
    return {"micro_batch_size": size, "checkpointing": "none", "precision": "fp32"}


@dataclass
class ListedProposer:
    """Proposes these sizes in their order."""

    sizes: list[int]
    baseline_size: int
    extra: list[Sequence[Trial]] = field(default_factory=list)

    def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
        self.extra.append(tuple(extra))
        return Proposal(choice_of(self.sizes.pop(0))) if self.sizes else None

    def baseline(self, trials: Sequence[Trial], answer: Choice) -> Choice | None:
        return choice_of(self.baseline_size)

    def certificate(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> None:
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class MadeUpSearch(Search):
    """A search whose runs have the speeds of a made-up machine."""

    speeds: dict[int, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def run(self, name: str, folder: str, experiment: Experiment, *_: Any) -> tuple[Result, dict[str, float]]:
        self.names.append(name)
        result = Result(outcome=Outcome.OK, seconds_total=1.0)
        return result, {"tokens_per_second": self.speeds[experiment.micro_batch_size], "peak_allocated_mib": 1.0}


@pytest.fixture(scope="module")
def problem() -> ExperimentProblem:
    space = {"micro_batch_size": list(SIZES), "checkpointing": ["none"], "precision": ["fp32"]}
    return make_experiment_problem({**TINY, "budget": "1GiB", "effective_batch_size": 4, "space": space})


def search(
    problem: ExperimentProblem,
    folder: Path,
    proposer: ListedProposer,
    speeds: dict[int, float],
    kind: type[MadeUpSearch] = MadeUpSearch,
) -> MadeUpSearch:
    folder.mkdir(exist_ok=True)
    study = StoredStudy(f"sqlite:///{folder}/optuna.db", "made-up", ("maximize",), {})
    return kind(problem, study, proposer, folder, Observer, SearchObserver(), speeds=speeds)


def test_a_check_that_contradicts_the_answer_becomes_a_trial_and_is_verified(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    one = search(problem, tmp_path, ListedProposer([2], baseline_size=4), {1: 50.0, 2: 100.0, 4: 120.0})
    search_and_verify(one)
    verification = one.verification
    assert [dict(trial.choice) for trial in one.trials] == [choice_of(2), choice_of(4)]
    assert verification is not None and verification.answer.choice == choice_of(4)
    roles = ((2, "verification: answer"), (4, "verification: plain"), (4, "verification 2: answer"))
    assert one.names[1:4] == [f"{role}: {label(choice_of(size))}" for size, role in roles]


def test_a_check_that_contradicts_the_answer_when_no_trial_is_left_is_answered_by_another(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    class Noisy(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            result, metrics = super().run(name, folder, experiment, *rest)
            was_disturbed = name.startswith("trial") and experiment.micro_batch_size == 4
            return result, metrics | ({"tokens_per_second": 95.0} if was_disturbed else {})

    one = search(problem, tmp_path, ListedProposer([4, 2], baseline_size=4), {1: 50.0, 2: 100.0, 4: 130.0}, Noisy)
    search_and_verify(one)
    assert [one.answer.choice for one in one.verifications if one] == [choice_of(2), choice_of(4)]
    found = findings_of(problem, one.runs, None, one.verification)
    assert found.best is not None and found.best.choice == choice_of(4) and found.speedup == 1


def test_a_check_that_agrees_ends_the_search_and_is_a_trial_all_the_same(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    one = search(problem, tmp_path, ListedProposer([2], baseline_size=1), {1: 50.0, 2: 100.0, 4: 120.0})
    search_and_verify(one)
    verification = one.verification
    assert verification is not None and verification.answer.choice == choice_of(2)
    assert [dict(trial.choice) for trial in one.trials] == [choice_of(2), choice_of(1)]
    roles = ((2, "verification: answer"), (1, "verification: plain"))
    assert one.names[1:] == [f"{role}: {label(choice_of(size))}" for size, role in roles]


def test_a_plain_run_that_is_repeated_as_losses_differ_is_kept_beside_the_trial(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    class Differing(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            _, metrics = super().run(name, folder, experiment, *rest)
            result = trained(10, away=0.5 * name.startswith("verification: plain"))
            return result, metrics | {"effective_batch_size": 4.0}

    one = search(problem, tmp_path, ListedProposer([2], baseline_size=1), {1: 50.0, 2: 100.0}, Differing)
    search_and_verify(one)
    assert one.verification is not None and one.verification.repeat_difference is not None
    assert [dict(trial.choice) for trial in one.trials] == [choice_of(2), choice_of(1)]
    assert [(run.source, run.choice) for run in one.extra] == [("answer", choice_of(2)), ("plain", choice_of(1))]
    assert speeds(choice_of(1), one.runs) == [50.0, 50.0]


@pytest.mark.quick
def test_the_search_goes_on_after_a_check_that_agrees_and_verifies_only_what_is_faster(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    class Later(ListedProposer):
        def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
            return super().next(trials, extra) if extra or not trials else None

    slower, faster = (
        search(problem, tmp_path / name, Later([2, 4], baseline_size=1), {1: 50.0, 2: 100.0, 4: speed})
        for name, speed in (("slower", 90.0), ("faster", 110.0))
    )
    for one in (slower, faster):
        search_and_verify(one)
    found = [one.verification for one in (slower, faster)]
    assert [one is not None and one.answer.choice for one in found] == [choice_of(2), choice_of(4)]
    assert not any(name.startswith("verification 2") for name in slower.names)
    assert any(name.startswith("verification 2: answer") for name in faster.names)


def test_what_a_verification_measured_is_passed_to_the_next_proposals(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    proposer = ListedProposer([2], baseline_size=4)
    one = search(problem, tmp_path, proposer, {1: 50.0, 2: 100.0, 4: 120.0})
    search_and_verify(one)
    assert not proposer.extra[0]
    assert [one.name for one in proposer.extra[-1]] == [
        "verification: answer",  # the plain run of this one is a trial
        "verification 2: answer",
        "verification 2: plain",
    ]
    assert [one.tokens_per_second for one in proposer.extra[-1]] == [100.0, 120.0, 100.0]
    assert tuple(one.extra) == proposer.extra[-1]  # those of both verifications
    assert speeds(choice_of(4), one.runs) == [120.0, 120.0], "each run once"


def test_what_was_verified_is_kept_when_a_later_trial_is_interrupted(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    """The verification refutes the answer, and Ctrl-C ends the next trial but one."""

    class Interrupted(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            if experiment.micro_batch_size == 1 and name.startswith("trial"):
                raise KeyboardInterrupt
            result, metrics = super().run(name, folder, experiment, *rest)
            is_refuted = experiment.micro_batch_size == 4 and name.startswith("verification")
            return (replace(result, outcome=Outcome.OUT_OF_MEMORY), {}) if is_refuted else (result, metrics)

    class Later(ListedProposer):
        def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
            return super().next(trials, extra) if extra or not trials else None

    one = search(problem, tmp_path, Later([4, 2, 1], baseline_size=4), {1: 50.0, 2: 80.0, 4: 100.0}, Interrupted)
    with pytest.raises(KeyboardInterrupt):
        search_and_verify(one)
    found = _findings(one, one.trials, SearchClock())
    assert [run.name for run in found.extra] == ["verification: answer"]
    assert found.best is not None and found.best.choice == choice_of(2), "the other one was refuted"
    assert found.verification is None, "the one that there was is not of this answer"


def test_a_verified_answer_stays_the_answer_when_a_later_trial_is_interrupted(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    class Interrupted(ListedProposer):
        def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
            if extra:
                raise KeyboardInterrupt
            return super().next(trials, extra)

    one = search(problem, tmp_path, Interrupted([1, 2], baseline_size=1), {1: 50.0, 2: 100.0})
    with pytest.raises(KeyboardInterrupt):
        search_and_verify(one)
    found = _findings(one, one.trials, SearchClock())
    assert found.verification is not None and found.verification.answer.choice == choice_of(2)
    assert [run.name for run in found.extra] == ["verification: answer", "verification: plain"]


def test_the_answer_is_the_fastest_by_all_runs_before_the_last_verification(problem: ExperimentProblem) -> None:
    """A page between two verifications has the runs of the first one."""
    trials = rows_of({1: 98.0, 2: 100.0})
    metrics = {"tokens_per_second": 80.0}
    again = Trial(number=0, source=ANSWER, choice=choice_of(2), outcome="ok", fits=True, metrics=metrics)
    found = findings_of(problem, [*trials, again])
    assert found.best is not None and found.best.choice == choice_of(1)


def test_a_trial_has_the_mean_speed_to_beat_and_a_repeat_has_nothing(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    class Repeating(ListedProposer):
        def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
            proposal = super().next(trials, extra)
            return proposal and replace(proposal, is_repeat=any(one.choice == proposal.choice for one in trials))

    class Slower(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            result, metrics = super().run(name, folder, experiment, *rest)
            to_beat.append(rest[1].seconds_to_beat)
            self.speeds[experiment.micro_batch_size] *= 0.96
            return result, metrics

    to_beat: list[float | None] = []
    one = search(problem, tmp_path, Repeating([2, 2, 4], baseline_size=1), {1: 50.0, 2: 100.0, 4: 50.0}, Slower)
    run_trials(one, math.inf)
    assert to_beat == [None, None, pytest.approx(1 / math.sqrt(100.0 * 96.0))]  # of one token


def test_a_worker_that_waits_proposes_only_after_a_trial_has_ended(
    problem: ExperimentProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many configurations and trials a proposal takes seconds of a core."""
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_POLLS", 0.01)
    one = search(problem, tmp_path, ListedProposer([1], baseline_size=1), {1: 50.0})
    other = StoredStudy(f"sqlite:///{tmp_path}/optuna.db", "made-up", ("maximize",), {})
    assert other.enqueue(Proposal(choice_of(2)), problem.space)
    num_polls = 0

    class Waiting(SearchObserver):
        def waiting(self) -> None:
            monkeypatch.setattr(StoredStudy, "free_stale", poll)

    def poll(_: StoredStudy) -> None:
        nonlocal num_polls
        num_polls += 1
        if num_polls == 10:
            release.set()

    def measure(number: int, queued: Proposal) -> FrozenTrial:
        taken.set()
        assert release.wait(60)
        metrics = {"tokens_per_second": 100.0, "peak_allocated_mib": 1.0}
        result = Result(outcome=Outcome.OK, seconds_total=1.0)
        return judge(result, metrics, 2**30)

    taken, release = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other.run_next, measure, 16, lambda: None)
        assert taken.wait(60)
        run_trials(replace(one, observer=Waiting()), math.inf)
        assert done.result() == 0
    assert len(one.trials) == 2 and num_polls >= 10
    assert len(one.proposer.extra) == 3, "of its own trial, before it waits, and once the other's has ended"


def test_a_lost_trial_that_is_found_as_the_last_one_begins_is_reported(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    """Its run in MLflow would stay RUNNING."""

    class Finding(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            self.study._lost.put((7, True))
            labels.append(rest[0])
            return super().run(name, folder, experiment, *rest)

    class Lost(SearchObserver):
        def lost(self, number: int, is_measured_again: bool) -> None:
            lost.append((number, is_measured_again))

    lost: list[tuple[int, bool]] = []
    labels: list[dict[str, str]] = []
    last = replace(problem, settings=problem.settings.model_copy(update={"num_trials": 1}))
    study, speeds = StoredStudy(f"sqlite:///{tmp_path}/optuna.db", "made-up", ("maximize",), {}), {2: 100.0}
    run_trials(Finding(last, study, ListedProposer([2], 1), tmp_path, Observer, Lost(), speeds=speeds), math.inf)
    assert lost == [(7, True)]
    [labels_of_run] = labels
    assert (labels_of_run["study_key"], labels_of_run["trial"]) == (study.key, "1"), "by which its run is found"


def test_the_search_goes_on_where_the_verification_refutes_the_answer(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    """The only trial does not fit when it is trained again, and the proposer would measure another."""

    class RefutedProposer(ListedProposer):
        def next(self, trials: Sequence[Trial], extra: Sequence[Trial] = ()) -> Proposal | None:
            if not trials:
                return Proposal(choice_of(4))
            is_refuted = any(one.outcome == "out_of_memory" for one in extra)
            return Proposal(choice_of(2)) if is_refuted and len(trials) == 1 else None

    class Refuting(MadeUpSearch):
        def run(self, name: str, folder: str, experiment: Experiment, *rest: Any) -> tuple[Result, dict[str, float]]:
            if "verification" in name and experiment.micro_batch_size == 4:
                return Result(outcome=Outcome.OUT_OF_MEMORY, seconds_total=1.0), {}
            return super().run(name, folder, experiment, *rest)

    one = search(problem, tmp_path, RefutedProposer([], baseline_size=1), {1: 50.0, 2: 80.0, 4: 100.0}, Refuting)
    search_and_verify(one)
    choices = [dict(trial.choice) for trial in one.trials]
    assert one.verification is not None and one.verification.answer.outcome == "ok", choices


def test_what_the_verification_measured_is_stored_while_another_process_measures(
    problem: ExperimentProblem, tmp_path: Path
) -> None:
    one = search(problem, tmp_path, ListedProposer([], baseline_size=1), {1: 50.0})
    assert one.study.enqueue(Proposal(choice_of(4)), problem.space)  # what another worker measures at this moment
    measured = one.run("verification: plain", "verification-01 plain", problem.runnable(choice_of(1)))
    assert [store_measurement(one, choice_of(1), *measured) for _ in range(2)] == [True, False]
    assert [dict(trial.choice) for trial in one.trials] == [choice_of(1)]
