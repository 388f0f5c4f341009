"""A job: choose a trial, run it, judge it; then say which configuration is the fastest that fits."""

import contextlib
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.environment import environment
from pipeline.metrics import MIB
from pipeline.predict import summary
from pipeline.publish import publish
from pipeline.report.search import SearchFindings, trials_frame
from pipeline.report.trials import TrialRow, best_row, in_words
from pipeline.searching.choose import choose, next_naive
from pipeline.searching.judge import judge, peak_bytes
from pipeline.searching.plan import SearchPlan, plan_search
from pipeline.searching.study import CONSTRAINT, DETAIL, FIGURES, OUTCOME, StoredStudy
from pipeline.space import Choice
from pipeline.tracking.parent import ParentRun, open_parent

DIRECTIONS = {"throughput": ("maximize",), "pareto": ("maximize", "minimize")}
SECONDS_BETWEEN_LOOKS = 1.0
"""How often to look whether another process has finished its trial."""


def search(given: Mapping[str, Any], console: Console) -> int:
    """Search, print and log the answer; return the exit code: 1 where nothing fits the budget."""
    findings = find(given, console)
    return 1 if findings is None or findings.best is None else 0


def find(given: Mapping[str, Any], console: Console) -> SearchFindings | None:
    """Search, print, log and return what was found; None where nothing was measured."""
    plan = plan_search(given)
    study = StoredStudy(plan.settings.storage, plan.settings.study, DIRECTIONS[plan.settings.objectives], plan.identity)
    subject = f"{plan.base.settings.model} in {plan.budget_bytes / MIB:,.0f} MiB"
    with open_parent("search", subject, plan.base.settings.output) as parent, study.must_answer():
        parent.params({**plan.base.params(), **plan.settings.model_dump(mode="json")})
        parent.tags({"device": str(plan.base.device), "study": plan.settings.study})
        parent.file("environment.json", json.dumps(environment(plan.base.device), indent=1))
        try:
            _run_trials(plan, study, parent, console)
        finally:
            parent.succeeded = _report(plan, study, parent, console) is not None
    rows = rows_of(plan, study)
    return findings_of(plan, rows) if rows else None


def _run_trials(plan: SearchPlan, study: StoredStudy, parent: ParentRun, console: Console) -> None:
    """Measure configurations until there are num_trials, or the space is used up."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = min(plan.settings.num_trials, len(plan.space.choices))
        task = progress.add_task("", total=total)
        while len(rows := rows_of(plan, study)) < total:
            progress.update(task, completed=len(rows), description=_incumbent(rows))
            choice = _next(plan, study, rows, total)
            trial = None if choice is None else study.start(choice, plan.space, total)
            if choice is not None and trial is not None:
                row = _run_trial(plan, choice, trial, study, parent)
                progress.print(
                    f"trial {row.number + 1}: {in_words(row.choice)}: {row.in_words}", style="dim", highlight=False
                )
            elif choice is None and not study.num_running_here:
                break
            elif choice is None:
                progress.update(task, description="waiting for the trials of another process")
                time.sleep(SECONDS_BETWEEN_LOOKS)
                study.free_abandoned()


def _next(plan: SearchPlan, study: StoredStudy, rows: list[TrialRow], total: int) -> Choice | None:
    """Return what to measure next; None where all are taken, or the last of `total` is being measured."""
    if len(rows) + study.num_running_here >= total:
        return None
    fitting = [dict(row.choice) for row in rows if row.fits]
    seed, sampler = plan.base.settings.seed, plan.settings.sampler
    return next_naive(plan.naive, fitting, study.taken) or choose(
        plan.space, study.trials, study.taken, study.directions, sampler, seed
    )


def _run_trial(
    plan: SearchPlan, choice: Choice, trial: optuna.Trial, study: StoredStudy, parent: ParentRun
) -> TrialRow:
    """Run and judge one configuration."""
    experiment = plan.experiment(choice)
    name = f"trial {trial.number + 1}: {in_words(choice)}"
    try:
        result, figures = parent.run(
            name,
            experiment,
            partial(summary, experiment),
            {"variant": in_words(choice), "trial": str(trial.number + 1)},
        )
    except BaseException:
        study.abandon(trial.number)
        raise
    study.finish(trial, judge(result, figures, plan.budget_bytes), result, figures)
    return next(row for row in rows_of(plan, study) if row.number == trial.number)


def _report(plan: SearchPlan, study: StoredStudy, parent: ParentRun, console: Console) -> TrialRow | None:
    """Print and log what was found; return the fastest configuration that fits."""
    rows = rows_of(plan, study)
    best = best_row(rows)
    if not rows:
        return None
    if best is not None:
        config = plan.experiment(dict(best.choice)).to_yaml()
        parent.file("best.yaml", config)
        with contextlib.suppress(OSError):  # a convenience: the run's own folder has it too
            Path("best.yaml").write_text(config)
        parent.metrics({f"best_{name}": value for name, value in best.figures.items()})
    publish(findings_of(plan, rows), {"trials.csv": trials_frame(rows).to_csv(index=False)}, parent, console)
    if best is not None:
        console.print("run it: mlflow run . -P config=best.yaml", highlight=False)
    return best


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


def findings_of(plan: SearchPlan, rows: list[TrialRow]) -> SearchFindings:
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
        settings={name: value for name, value in plan.base.params().items() if name not in plan.space.dimensions},
        environment=environment(plan.base.device),
    )


def _incumbent(rows: list[TrialRow]) -> str:
    best = best_row(rows)
    return "nothing fits yet" if best is None else f"best {best.tokens_per_second:,.0f} tokens/s"
