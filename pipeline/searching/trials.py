"""The trials of a search: proposed, run in processes of their own, judged, and read back from the study."""

import math
import statistics
import time
from dataclasses import replace
from functools import partial

import optuna
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.base.results import Result
from pipeline.config.experiment import Experiment
from pipeline.prediction.summary import summary
from pipeline.runtime.run import execute
from pipeline.searching.judge import CONSTRAINT, OUTCOME, judge, peak_bytes
from pipeline.searching.problem import SearchPlan
from pipeline.searching.proposals import Proposal, Proposer
from pipeline.searching.results import Trial, best_trial, each_once, in_words
from pipeline.searching.study import DETAIL, FIGURES, StoredStudy
from pipeline.searching.trial_length import HOPELESS_STEPS, TrialLength
from pipeline.tracking.parent import ParentRun
from pipeline.training.loop import train
from pipeline.training.metrics import Summary

SECONDS_BETWEEN_LOOKS = 1.0
"""How often to look whether another process has finished its trial."""


def run_trials(plan: SearchPlan, study: StoredStudy, proposer: Proposer, parent: ParentRun, console: Console) -> None:
    """Measure configurations until the proposer wants none, there are num_trials, or the time is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    deadline = time.monotonic() + (plan.settings.search_time_limit or math.inf)
    with Progress(*columns, console=console, transient=True) as progress:
        total = plan.settings.num_trials
        task = progress.add_task("", total=min(total, len(plan.space.choices)))
        while len(rows := rows_of(plan, study)) < total and (not rows or time.monotonic() < deadline):
            progress.update(task, completed=len(each_once(rows)), description=_incumbent(rows))
            is_last_running = len(rows) + study.num_running_here >= total
            proposal = None if is_last_running else proposer.next(rows)
            trial = None if proposal is None else study.start(proposal.choice, plan.space, total, again=proposal.again)
            if proposal is not None and trial is not None:
                row = _run_trial(plan, proposal, trial, best_trial(rows), study, parent)
                progress.print(f"{_name(row.number, proposal)}: {row.in_words}", style="dim", highlight=False)
            elif proposal is None and not study.num_running_here:
                break
            elif proposal is None:
                progress.update(task, description="waiting for the trials of another process")
                time.sleep(SECONDS_BETWEEN_LOOKS)
                study.free_abandoned()


def rows_of(plan: SearchPlan, study: StoredStudy) -> list[Trial]:
    """Return the study's measured trials, those of earlier sessions included."""
    return [
        Trial(
            number=trial.number,
            choice={name: trial.params[name] for name in plan.space.dimensions},
            outcome=trial.user_attrs[OUTCOME],
            detail=trial.user_attrs[DETAIL],
            fits=trial.values is not None and trial.constraints.get(CONSTRAINT, 1.0) <= 0,
            peak_bytes=peak_bytes(trial.user_attrs[FIGURES]),
            metrics=trial.user_attrs[FIGURES],
        )
        for trial in study.trials
    ]


def _run_trial(
    plan: SearchPlan,
    proposal: Proposal,
    trial: optuna.Trial,
    best: Trial | None,
    study: StoredStudy,
    parent: ParentRun,
) -> Trial:
    """Run and judge one configuration."""
    choice, experiment = proposal.choice, plan.experiment(proposal.choice)
    length = partial(train, stop=_length(plan, experiment, best))
    try:
        result, metrics = parent.run(
            _name(trial.number, proposal),
            experiment,
            partial(_summarize, experiment, proposal),
            {"variant": in_words(choice), "trial": str(trial.number + 1)},
            measure=partial(execute, work=length),
        )
    except BaseException:
        study.abandon(trial.number)
        raise
    study.finish(trial, judge(result, metrics, plan.budget_bytes), result, metrics)
    return next(row for row in rows_of(plan, study) if row.number == trial.number)


def _name(number: int, proposal: Proposal) -> str:
    again = " (measured again)" if proposal.again else ""
    return f"trial {number + 1}{again}: {in_words(proposal.choice)}"


def _length(plan: SearchPlan, experiment: Experiment, best: Trial | None) -> TrialLength:
    """Return how long a trial is; on the way to a front no slow trial is hopeless, since it may be lean."""
    settings = plan.settings
    tokens = experiment.effective_batch_size * experiment.settings.sequence_length
    speed = best.tokens_per_second if best is not None and settings.objectives == "throughput" else None
    return TrialLength(
        warmup_steps=experiment.settings.timing_warmup_steps,
        precision_percent=settings.precision_percent,
        seconds_to_beat=tokens / speed if speed else None,
    )


def _summarize(experiment: Experiment, proposal: Proposal, result: Result) -> Summary:
    """Return a trial's summary: with what its time was predicted to be, and the loss of the steps that all share."""
    own = summary(experiment, result)
    metrics = dict(own.metrics)
    common = result.steps[: experiment.settings.timing_warmup_steps + HOPELESS_STEPS]
    if len(common) == experiment.settings.timing_warmup_steps + HOPELESS_STEPS:
        metrics["common_steps_loss"] = statistics.fmean(record.loss for record in common)
    if proposal.predicted_seconds is not None:
        metrics["predicted_seconds_per_step"] = proposal.predicted_seconds
    return replace(own, metrics=metrics)


def _incumbent(rows: list[Trial]) -> str:
    best = best_trial(rows)
    return "nothing fits yet" if best is None else f"best {best.tokens_per_second:,.0f} tokens/s"
