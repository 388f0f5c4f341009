"""A job: choose a trial, run it, judge it; then check which configuration is the fastest that fits, and say so."""

import contextlib
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.contracts import Result
from pipeline.environment import environment
from pipeline.execute import execute
from pipeline.experiment import Experiment
from pipeline.files import write_whole
from pipeline.handover.write import hand_over
from pipeline.metrics import MIB, Summary
from pipeline.predict import summary
from pipeline.publish import publish
from pipeline.report.certificate import Certificate, Verification
from pipeline.report.search import SearchFindings, trials_frame
from pipeline.report.trials import TrialRow, best_row, in_words
from pipeline.searching.judge import CONSTRAINT, OUTCOME, judge, peak_bytes
from pipeline.searching.length import HOPELESS_STEPS, TrialLength
from pipeline.searching.plan import SearchPlan, plan_search
from pipeline.searching.propose import Proposal, Proposer, make_proposer, make_sampler
from pipeline.searching.study import DETAIL, FIGURES, StoredStudy
from pipeline.searching.verify import verify
from pipeline.tracking.parent import ParentRun, open_parent
from pipeline.train import train

DIRECTIONS = {"throughput": ("maximize",), "pareto": ("maximize", "minimize")}
SECONDS_BETWEEN_LOOKS = 1.0
"""How often to look whether another process has finished its trial."""


def search(given: Mapping[str, Any], console: Console) -> int:
    """Search, print and log the answer; return the exit code: 1 where nothing fits the budget."""
    findings = find(given, console)
    return 1 if findings is None or findings.best is None else 0


def find(given: Mapping[str, Any], console: Console) -> SearchFindings | None:
    """Search, print and log the answer, and return what was found; None where nothing was measured.

    Raises:
        InvalidInputError: a setting is wrong, or nothing is predicted to fit the budget.

    """
    plan = plan_search(given)
    with console.status(f"looking ahead at {len(plan.space.choices)} configurations"):
        sampler = make_sampler(plan)
    study = StoredStudy(plan.settings.storage, plan.settings.study, DIRECTIONS[plan.settings.objectives], plan.identity)
    proposer = make_proposer(plan, study, sampler)
    subject = f"{plan.base.settings.model} in {plan.budget_bytes / MIB:,.0f} MiB"
    with open_parent("search", subject, plan.base.settings.output) as parent, study.must_answer():
        parent.params({**plan.base.params(), **plan.settings.model_dump(mode="json")})
        parent.tags({"device": str(plan.base.device), "study": plan.settings.study})
        parent.file("environment.json", json.dumps(environment(plan.base.device), indent=1))
        findings, verification = None, None
        try:
            _run_trials(plan, study, proposer, parent, console)
            rows = rows_of(plan, study)
            if plan.settings.verify_steps:
                say = partial(console.print, style="dim", highlight=False)
                verification = verify(plan, rows, proposer.naive(rows), parent, say)
        finally:
            findings = _report(plan, study, proposer, verification, parent, console)
            parent.succeeded = findings is not None and findings.best is not None
    return findings


def _run_trials(plan: SearchPlan, study: StoredStudy, proposer: Proposer, parent: ParentRun, console: Console) -> None:
    """Measure configurations until the proposer wants none, there are num_trials, or the time is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    deadline = time.monotonic() + (plan.settings.search_time_limit or math.inf)
    with Progress(*columns, console=console, transient=True) as progress:
        total = min(plan.settings.num_trials, len(plan.space.choices))
        task = progress.add_task("", total=total)
        while len(rows := rows_of(plan, study)) < total and (not rows or time.monotonic() < deadline):
            progress.update(task, completed=len(rows), description=_incumbent(rows))
            is_last_running = len(rows) + study.num_running_here >= total
            proposal = None if is_last_running else proposer.next(rows)
            trial = None if proposal is None else study.start(proposal.choice, plan.space, total)
            if proposal is not None and trial is not None:
                row = _run_trial(plan, proposal, trial, best_row(rows), study, parent)
                progress.print(
                    f"trial {row.number + 1}: {in_words(row.choice)}: {row.in_words}", style="dim", highlight=False
                )
            elif proposal is None and not study.num_running_here:
                break
            elif proposal is None:
                progress.update(task, description="waiting for the trials of another process")
                time.sleep(SECONDS_BETWEEN_LOOKS)
                study.free_abandoned()


def _run_trial(
    plan: SearchPlan,
    proposal: Proposal,
    trial: optuna.Trial,
    best: TrialRow | None,
    study: StoredStudy,
    parent: ParentRun,
) -> TrialRow:
    """Run and judge one configuration."""
    choice, experiment = proposal.choice, plan.experiment(proposal.choice)
    name = f"trial {trial.number + 1}: {in_words(choice)}"
    length = partial(train, enough=_length(plan, experiment, best))
    try:
        result, figures = parent.run(
            name,
            experiment,
            partial(_figures, experiment, proposal),
            {"variant": in_words(choice), "trial": str(trial.number + 1)},
            measure=partial(execute, work=length),
        )
    except BaseException:
        study.abandon(trial.number)
        raise
    study.finish(trial, judge(result, figures, plan.budget_bytes), result, figures)
    return next(row for row in rows_of(plan, study) if row.number == trial.number)


def _length(plan: SearchPlan, experiment: Experiment, best: TrialRow | None) -> TrialLength:
    """Return how long a trial is; on the way to a front no slow trial is hopeless, since it may be lean."""
    settings = plan.settings
    tokens = experiment.effective_batch_size * experiment.settings.sequence_length
    speed = best.tokens_per_second if best is not None and settings.objectives == "throughput" else None
    return TrialLength(
        warmup_steps=experiment.settings.timing_warmup_steps,
        precision_percent=settings.precision_percent,
        seconds_to_beat=tokens / speed if speed else None,
    )


def _figures(experiment: Experiment, proposal: Proposal, result: Result) -> Summary:
    """Return a trial's summary: with what its time was predicted to be, and the loss of the steps that all share."""
    own = summary(experiment, result)
    figures = dict(own.metrics)
    common = result.steps[: experiment.settings.timing_warmup_steps + HOPELESS_STEPS]
    if len(common) == experiment.settings.timing_warmup_steps + HOPELESS_STEPS:
        figures["common_steps_loss"] = statistics.fmean(record.loss for record in common)
    if proposal.predicted_seconds is not None:
        figures["predicted_seconds_per_step"] = proposal.predicted_seconds
    return replace(own, metrics=figures)


def _report(
    plan: SearchPlan,
    study: StoredStudy,
    proposer: Proposer,
    verification: Verification | None,
    parent: ParentRun,
    console: Console,
) -> SearchFindings | None:
    """Print and log what was found; None where nothing was measured."""
    rows = rows_of(plan, study)
    if not rows:
        return None
    twice = verification.twice if verification else ()
    findings = findings_of(plan, rows, proposer.certificate(rows, twice), verification)
    best = findings.best
    if best is not None:
        experiment = plan.experiment(dict(best.choice))
        config = experiment.to_yaml()
        parent.file("best.yaml", config)
        with contextlib.suppress(OSError):  # a convenience: the run's own folder has it too
            write_whole(Path("best.yaml"), config.encode())
        for name, content in hand_over(experiment).items():
            parent.file(f"handover/{name}", content, "handover")
        parent.metrics({f"best_{name}": value for name, value in best.figures.items()})
    publish(findings, {"trials.csv": trials_frame(rows).to_csv(index=False)}, parent, console)
    if best is not None:
        console.print("run it: mlflow run . -P config=best.yaml", highlight=False)
    return findings


def rows_of(plan: SearchPlan, study: StoredStudy) -> list[TrialRow]:
    """Return the study's measured trials, those of earlier sessions included."""
    return [
        TrialRow(
            number=trial.number,
            choice={name: trial.params[name] for name in plan.space.dimensions},
            outcome=trial.user_attrs[OUTCOME],
            detail=trial.user_attrs[DETAIL],
            fits=trial.values is not None and trial.constraints.get(CONSTRAINT, 1.0) <= 0,
            peak_bytes=peak_bytes(trial.user_attrs[FIGURES]),
            figures=trial.user_attrs[FIGURES],
        )
        for trial in study.trials
    ]


def findings_of(
    plan: SearchPlan,
    rows: list[TrialRow],
    certificate: Certificate | None = None,
    verification: Verification | None = None,
) -> SearchFindings:
    """Return what the report is made from."""
    return SearchFindings(
        entry="search",
        model=plan.base.settings.model,
        effective_batch_size=plan.base.effective_batch_size,
        budget_bytes=plan.budget_bytes,
        num_configurations=len(plan.space.choices),
        naive=tuple(plan.naive),
        shows_front=plan.settings.objectives == "pareto",
        rows=tuple(rows),
        certificate=certificate,
        verification=verification,
        settings={name: value for name, value in plan.base.params().items() if name not in plan.space.dimensions},
        environment=environment(plan.base.device),
    )


def _incumbent(rows: list[TrialRow]) -> str:
    best = best_row(rows)
    return "nothing fits yet" if best is None else f"best {best.tokens_per_second:,.0f} tokens/s"
