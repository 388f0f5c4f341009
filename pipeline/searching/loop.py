"""The trials of a search: proposed, run in clean processes, judged, and stored in the study.

`run_trials` puts what a Proposer proposes into the study's queue, of which StoredStudy.run_next measures the first.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from optuna.trial import FrozenTrial

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome, Result
from pipeline.config.command import Runnable
from pipeline.config.space import MICRO_BATCH, Choice
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.run import Execute, Summarize, execute, run
from pipeline.runtime.run_folder import folder_name
from pipeline.searching.certificate import Certificate
from pipeline.searching.problem import Problem
from pipeline.searching.proposals import Proposer
from pipeline.searching.results import SearchFindings, Verification, answer_of
from pipeline.searching.study import StoredStudy
from pipeline.searching.trial_length import HOPELESS_STEPS, TrialLength
from pipeline.searching.trial_record import CONSTRAINT, DETAIL, METRICS, OUTCOME, judge
from pipeline.searching.trials import PLAIN, TRIAL, Proposal, Trial, best_speed, best_trial, label, run_name, trials_in
from pipeline.searching.verification import VerificationRun, has_taken, verify
from pipeline.training.loop import Stop, never_stop
from pipeline.training.metrics import Summary

SECONDS_BETWEEN_POLLS = 1.0
"""How often to check whether another worker has finished its trial."""


class SearchObserver(Observer):
    """Receives the events of a search in addition to those of its runs; by default it ignores them.

    Those of one run come from one thread, and several threads may run trials at the same time.
    """

    def runs(self, runs: Sequence[Trial]) -> None:
        """Receive the runs that have ended, before each trial."""

    def waiting(self) -> None:
        """Called when a worker starts to wait for the trials of others."""

    def proposed(self, proposal: Proposal) -> None:
        """Receive the configuration that is measured next, with the bound on the best one so far."""

    def trial(self, name: str, trial: Trial) -> None:
        """Receive a trial that has ended."""

    def lost(self, number: int, is_measured_again: bool) -> None:
        """Receive the number of a trial whose worker died, and whether its configuration is measured again."""

    def verified(self, name: str, result: Result) -> None:
        """Receive a run of the verification that has ended."""


@dataclass(frozen=True)
class Search:
    """A running search: its problem, its study and the observer of its events."""

    problem: Problem
    study: StoredStudy
    proposer: Proposer
    folder: Path
    """The folder of the runs' folders."""
    tracker: Callable[[], Observer]
    """Makes an observer of one run."""
    observer: SearchObserver
    executors: Sequence[Execute] = (execute,)
    """How each worker runs an experiment in a process: on which device, or on which machine (setup.py)."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the worker that chooses its next configuration."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the workers are to end at once, and their runs with them."""
    extra: list[Trial] = field(default_factory=list)
    """The runs of verifications so far that are no trials."""
    verifications: list[Verification | None] = field(default_factory=list)
    """The verifications so far; None for one where nothing fitted."""

    def run(
        self,
        name: str,
        folder: str,
        runnable: Runnable,
        labels: dict[str, str],
        stop: Stop = never_stop,
        summarize: Summarize | None = None,
    ) -> tuple[Result, dict[str, float]]:
        """Run a configuration in a folder of this name, with the first executor; return its result and metrics."""
        one = Run(name=name, runnable=runnable, folder=self.folder / folder_name(folder), labels=labels)
        conclude = summarize or partial(self.problem.summary, runnable)
        observers = [self.tracker(), self.observer]
        result, found = run(
            one, observers, stop=stop, summarize=conclude, executor=self.executors[0], cancelled=self.cancelled
        )
        return result, dict(found.metrics)

    @property
    def trials(self) -> list[Trial]:
        """The study's measured trials, including those of earlier sessions and other workers."""
        return trials_of(self.problem, self.study)

    @property
    def runs(self) -> list[Trial]:
        """All runs so far: the trials, and those of verifications."""
        return [*self.trials, *self.extra]

    @property
    def verification(self) -> Verification | None:
        """The last verification; None if nothing was verified."""
        return self.verifications[-1] if self.verifications else None


def trials_of(problem: Problem, study: StoredStudy) -> list[Trial]:
    """Return the study's measured trials, including those of earlier sessions and other workers."""
    return [
        Trial(
            number=trial.number,
            choice={name: trial.params[name] for name in problem.space.dimensions},
            outcome=trial.user_attrs[OUTCOME],
            detail=trial.user_attrs[DETAIL],
            fits=trial.values is not None and trial.constraints.get(CONSTRAINT, 1.0) <= 0,
            metrics=trial.user_attrs[METRICS],
        )
        for trial in study.trials
    ]


def run_trials(search: Search, deadline: float) -> None:
    """Let all workers measure configurations until none is worth its time; an error or Ctrl-C in one ends all.

    Each is a thread; a single one runs in this thread. The deadline is in seconds of time.monotonic().

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; each worker has ended its process and stored its trial.

    """
    if len(search.executors) == 1:
        _run_trials_alone(search, deadline)
        return
    with ThreadPoolExecutor(len(search.executors), thread_name_prefix="worker") as pool:
        workers = [replace(search, executors=(one,)) for one in search.executors]
        running = [pool.submit(_run_trials_alone, worker, deadline) for worker in workers]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()
        except BaseException:
            search.cancelled.set()
            raise


def _run_trials_alone(search: Search, deadline: float) -> None:
    """Measure configurations until none is worth its time, num_trials are reached, or the deadline has passed.

    Several workers may do so at the same time: each goes on until nothing is left to measure or being measured. The
    first trial is run even after the deadline.
    """
    study, total = search.study, search.problem.settings.num_trials
    while not search.cancelled.is_set():
        states = study.states  # before the trials that are read now
        if len(trials := search.trials) >= total:
            break
        if trials and time.monotonic() >= deadline:
            break
        _emit_lost(search)
        search.observer.runs([*trials, *search.extra])
        with ExitStack() as turn:
            turn.enter_context(search.turn)
            if _fill_queue(search, trials):
                _run_trial(search, best_speed([*trials, *search.extra]), turn.close)
                continue
        if not study.num_open:
            break
        search.observer.waiting()
        while not search.cancelled.wait(SECONDS_BETWEEN_POLLS):
            study.free_stale()
            if study.states != states or time.monotonic() >= deadline:
                break
    _emit_lost(search)  # those that were found as the last trial began


def _emit_lost(search: Search) -> None:
    for number, is_measured_again in search.study.lost():
        search.observer.lost(number, is_measured_again)


def _fill_queue(search: Search, trials: Sequence[Trial]) -> bool:
    """Whether the queue has a trial to run: that of a worker that died, or the one that is proposed now."""
    study, problem = search.study, search.problem
    if study.num_waiting:
        return True
    if len(trials) + study.num_open >= problem.settings.num_trials:
        return False
    one = _plain_one(problem, trials) or search.proposer.next(trials, search.extra)
    if one is None:
        return False
    search.observer.proposed(one)
    return study.enqueue(one, problem.space)


def _plain_one(problem: Problem, trials: Sequence[Trial]) -> Proposal | None:
    """Return the plain configuration of the first trial if all have crashed: it shows whether any can run."""
    if {trial.outcome for trial in trials} != {Outcome.CRASHED}:
        return None
    if any(trial.choice in problem.baselines for trial in trials):
        return None
    size = trials[0].choice.get(MICRO_BATCH)
    return next((Proposal(choice) for choice in problem.baselines if choice.get(MICRO_BATCH) == size), None)


def search_and_verify(search: Search) -> None:
    """Run the trials and verify the answer, until what the verification measured leaves nothing worth a trial.

    The verifications, and their runs that are no trials, are kept in the search as soon as each has ended. The answer
    is verified again if a run of the verification contradicts it, or if a later trial was faster; once more if no trial
    is left and another configuration is the faster one by all runs. If the plain configuration of the verification
    has no trial, its measurement is added to the study as one.
    """
    deadline = time.monotonic() + (search.problem.settings.search_time_limit or math.inf)
    num_verified = -1
    run_trials(search, deadline)
    while search.problem.settings.verify_steps and not _stands(search):
        trials = search.trials
        has_new_trials = len(trials) != num_verified
        if not has_new_trials and not _is_overtaken(search):
            return
        num_verified = len(trials)
        search.verifications.append(_verify(search, trials))
        if search.verification is None:
            return
        run_trials(search, deadline)
        if not has_new_trials:
            return


def _stands(search: Search) -> bool:
    """Return whether no run contradicts the verification, and its answer is the fastest by all runs of it."""
    if search.verification is None:
        return False
    answer, verified = answer_of(search.runs, search.verification), search.verification.answer
    is_contradicted = search.verification.is_contradicted(search.problem.settings.gap)
    return answer is not None and answer.choice == verified.choice and not is_contradicted


def _is_overtaken(search: Search) -> bool:
    """Return whether the verified configuration completed, and another one is faster by all runs."""
    if search.verification is None or search.verification.answer.outcome != Outcome.OK:
        return False
    best = best_trial(search.runs)
    return best is not None and best.choice != search.verification.answer.choice


def _verify(search: Search, trials: Sequence[Trial]) -> Verification | None:
    """Verify the answer; each of its runs becomes a trial or is added to the search's other measurements."""
    number, roles = len(search.verifications), list[str]()

    def measure(choice: Choice, role: str) -> VerificationRun:
        name, labels = f"{run_name(number, role)}: {label(choice)}", {"variant": label(choice), "verification": role}
        stop = partial(has_taken, search.problem.settings.verify_steps) if role == PLAIN else never_stop
        roles.append(role)
        again = f" {roles.count(role)}" if roles.count(role) > 1 else ""  # an answer that fails gives way to another
        folder = f"verification-{number + 1:02} {role}{again}"
        result, metrics = search.run(name, folder, search.problem.verified(choice), labels, stop)
        search.observer.verified(name, result)
        run = Trial(
            number=number,
            source=role,
            choice=choice,
            outcome=result.outcome.value,
            detail=result.detail,
            fits=result.outcome is Outcome.OK,
            metrics=metrics,
        )
        if role != PLAIN or not store_measurement(search, choice, result, metrics):
            search.extra.append(run)
        return VerificationRun(run, result)

    return verify(search.problem, [*trials, *search.extra], partial(search.proposer.baseline, trials), measure)


def store_measurement(search: Search, choice: Choice, result: Result, metrics: dict[str, float]) -> bool:
    """Add a run that was measured outside of the trials to the study; return False if its configuration has a trial."""
    return search.study.add(choice, search.problem.space, _judged(search, result, metrics))


def _judged(search: Search, result: Result, metrics: dict[str, float]) -> FrozenTrial:
    return judge(result, metrics, search.problem.budget_bytes, len(search.study.directions))


def _run_trial(search: Search, to_beat: float | None, began: Callable[[], None]) -> None:
    """Run and judge the first configuration of the queue; `began` is called once it is taken.

    `to_beat` is the speed of the fastest one so far, in tokens per second.
    """
    names: list[str] = []

    def measure(number: int, one: Proposal) -> FrozenTrial:
        runnable = search.problem.runnable(one.choice)
        again = " (measured again)" if one.is_repeat else ""
        names.append(f"{run_name(number)}{again}: {label(one.choice)}")
        of_study = {"study": search.study.name, "study_key": search.study.key}
        labels = {"variant": label(one.choice), **of_study, "trial": str(number + 1)}
        stop = _trial_length(search.problem, runnable, None if one.is_repeat else to_beat)
        summarize = partial(_summary, search.problem, runnable, one.predicted_seconds)
        result, metrics = search.run(names[0], f"trial-{number + 1:02}", runnable, labels, stop, summarize)
        if reason := search.problem.why_not_searched(search.trials, one.choice, result, metrics):
            raise InvalidInputError(reason)
        return _judged(search, result, metrics)

    number = search.study.run_next(measure, search.problem.settings.num_trials, began)
    if number is not None:
        search.observer.trial(names[0], next(one for one in search.trials if one.number == number))


def _trial_length(problem: Problem, runnable: Runnable, to_beat: float | None) -> TrialLength:
    """Return when a trial may stop; a slow one is stopped early only if throughput is the only objective.

    A repeated one has nothing to beat, since it would be compared with an earlier run of its own.
    """
    settings = problem.settings
    speed = to_beat if settings.objectives == "throughput" else None
    return TrialLength(
        warmup_steps=runnable.timing_warmup_steps,
        precision_percent=settings.precision_percent,
        seconds_to_beat=problem.tokens_per_position(runnable) / speed if speed else None,
    )


def _summary(problem: Problem, runnable: Runnable, predicted_seconds: float | None, result: Result) -> Summary:
    """Return a trial's summary, with its predicted time and the mean loss of the steps that all trials share."""
    own = problem.summary(runnable, result)
    metrics = dict(own.metrics)
    num_common = runnable.timing_warmup_steps + HOPELESS_STEPS
    if len(result.steps) >= num_common:
        metrics["common_steps_loss"] = statistics.fmean(record.loss for record in result.steps[:num_common])
    if predicted_seconds is not None:
        metrics["predicted_seconds_per_step"] = predicted_seconds
    return replace(own, metrics=metrics)


def findings_of(
    problem: Problem,
    runs: Sequence[Trial],
    certificate: Certificate | None = None,
    verification: Verification | None = None,
) -> SearchFindings:
    """Return the findings of the search, from which its report is made.

    The last verification is left out if another configuration has been faster since, or has replaced one that it
    refuted.
    """
    best = answer_of(runs, verification)
    if best is not None and verification is not None and best.choice != verification.answer.choice:
        verification = None
    return SearchFindings(
        model=problem.base.title,
        effective_batch_size=problem.base.effective_batch_size,
        budget_bytes=problem.budget_bytes,
        num_configurations=len(problem.space.choices),
        baselines=tuple(problem.baseline_beside(dict(best.choice)) if best else problem.baselines),
        shows_front=problem.settings.objectives == "pareto",
        rows=tuple(trials_in(runs)),
        certificate=certificate,
        verification=verification,
        extra=tuple(run for run in runs if run.source != TRIAL),
        notes=problem.notes,
        settings=problem.shared_params,
        given=problem.given_words,
        num_trials=problem.settings.num_trials,
        environment=environment(problem.base.device),
    )
