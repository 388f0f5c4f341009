"""A job: choose a trial, run it, judge it; then say which configuration is the fastest that fits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipeline.contracts import InvalidInputError
from pipeline.environment import environment
from pipeline.experiment import FOLDER, Experiment, make_experiment, read_yaml
from pipeline.memory.device import find_device
from pipeline.metrics import MIB, summarize
from pipeline.report.search import (
    TrialRow,
    in_words,
    over_time_figure,
    pareto_front,
    plane_figure,
    trials_frame,
    trials_table,
)
from pipeline.search.choose import choose, naive_choices, next_naive
from pipeline.search.judge import judge, peak_bytes
from pipeline.search.settings import SearchSettings
from pipeline.search.space import Choice, Space, make_space
from pipeline.search.study import CONSTRAINT, DETAIL, FIGURES, OUTCOME, StoredStudy
from pipeline.settings import AllSettings, RunSettings, dotted, merged, nested, validate
from pipeline.tracking import ParentRun, open_parent

AUTO_BUDGET = {"cuda": "80%", "cpu": "256MiB"}
NOT_PART_OF_IDENTITY = ("output", "dataset_size", "time_limit", "accumulation_steps")
"""Settings that change no measurement, or that follow from another."""
DIRECTIONS = {"throughput": ("maximize",), "pareto": ("maximize", "minimize")}


@dataclass(frozen=True)
class SearchPlan:
    """A search, fully specified and checked."""

    settings: SearchSettings
    run_values: Mapping[str, Any]
    """What every trial sets; the choice comes on top."""
    space: Space
    base: Experiment
    """The first configuration of the space, for what all of them share."""

    def experiment(self, choice: Choice) -> Experiment:
        """Return the Experiment of one configuration."""
        return make_experiment(merged(self.run_values, nested(choice)), "search")

    @property
    def budget_bytes(self) -> int:
        """Memory to stay within."""
        budget = self.base.budget_bytes
        assert budget is not None  # plan_search has set one
        return budget

    @property
    def identity(self) -> dict[str, Any]:
        """What must not change while a study goes on, as the storage keeps it."""
        left_out = {*NOT_PART_OF_IDENTITY, *self.space.dimensions}
        about = environment(self.base.device)
        facts = {
            **{name: value for name, value in self.base.params().items() if name not in left_out},
            **{f"space.{name}": list(values) for name, values in self.space.dimensions.items()},
            "objectives": self.settings.objectives,
            "device_name": about["device_name"],
            "torch": about["torch"],
        }
        stored: dict[str, Any] = json.loads(json.dumps(facts))
        return stored


def search(given: Mapping[str, Any], console: Console) -> int:
    """Search, print and log the answer; return the exit code: 1 where nothing fits the budget."""
    plan = plan_search(given)
    study = StoredStudy(plan.settings.storage, plan.settings.study, DIRECTIONS[plan.settings.objectives], plan.identity)
    with open_parent("search", plan.base.settings.output) as parent:
        parent.params({**plan.base.params(), **plan.settings.model_dump(mode="json")})
        parent.tags({"question": _question(plan), "device": str(plan.base.device), "study": plan.settings.study})
        parent.file("environment.json", json.dumps(environment(plan.base.device), indent=1))
        try:
            _run_trials(plan, study, parent, console)
        finally:
            parent.succeeded = _report(plan, study, parent, console) is not None
    return 0 if parent.succeeded else 1


def plan_search(given: Mapping[str, Any]) -> SearchPlan:
    """Return the plan of experiments/search.yaml with the user's overrides, every configuration of its space checked.

    Raises:
        InvalidInputError: a setting, a dimension or one of its values is wrong.

    """
    file = nested({k: v for k, v in read_yaml(FOLDER / "search.yaml").items() if k not in ("space", "question")})
    own_values = {"space": read_yaml(FOLDER / "search.yaml").get("space", {})}
    values = merged(merged(file, own_values), given)
    own = validate(SearchSettings, {k: values.pop(k) for k in SearchSettings.model_fields if k in values}, "search")
    device = find_device(str(values.get("device", RunSettings.model_fields["device"].default)))
    values["budget"] = AUTO_BUDGET[device.type] if own.budget == "auto" else own.budget
    asked = validate(AllSettings, values, "search")
    effective = asked.effective_batch_size  # type: ignore[attr-defined]
    if effective is None:
        raise InvalidInputError("a search needs effective_batch_size, which must hold in every configuration; set it")
    typed = dict(dotted(asked.model_dump()))
    space = make_space(own, effective, {name: typed[name] for name, _ in dotted(given) if name in own.space})
    plan = SearchPlan(own, values, space, make_experiment(merged(values, nested(space.choices[0])), "search"))
    for choice in space.choices:
        reason = plan.experiment(choice).unsupported()
        if reason:
            raise InvalidInputError(f"{reason}; take it out of the space")
    plan.base.prepare()
    return plan


def _run_trials(plan: SearchPlan, study: StoredStudy, parent: ParentRun, console: Console) -> None:
    """Measure configurations until there are num_trials, or the space is used up."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = min(plan.settings.num_trials, len(plan.space.choices))
        task = progress.add_task("", total=total)
        while len(rows := _rows(plan, study)) < total:
            progress.update(task, completed=len(rows), description=_incumbent(rows))
            choice = _next(plan, study, rows)
            if choice is None:
                break
            row = _run_trial(plan, choice, study, parent)
            progress.print(
                f"trial {row.number + 1}: {in_words(row.choice)}: {_measured(row)}", style="dim", highlight=False
            )


def _next(plan: SearchPlan, study: StoredStudy, rows: list[TrialRow]) -> Choice | None:
    fitting = [dict(row.choice) for row in rows if row.fits]
    seed, sampler = plan.base.settings.seed, plan.settings.sampler
    return next_naive(_naive(plan), fitting, study.taken) or choose(
        plan.space, study.trials, study.taken, study.directions, sampler, seed
    )


def _run_trial(plan: SearchPlan, choice: Choice, study: StoredStudy, parent: ParentRun) -> TrialRow:
    """Run and judge one configuration."""
    experiment = plan.experiment(choice)
    warmup = experiment.settings.timing_warmup_steps
    trial = study.start(choice, plan.space)
    name = f"trial {trial.number + 1}: {in_words(choice)}"
    try:
        result = parent.run(
            name,
            experiment,
            lambda result: summarize(result, experiment.effective_batch_size, warmup),
            {"variant": in_words(choice), "trial": str(trial.number + 1)},
        )
    except KeyboardInterrupt:
        study.abandon(trial.number)
        raise
    figures = summarize(result, experiment.effective_batch_size, warmup)
    study.finish(trial, judge(result, figures, plan.budget_bytes), result, figures)
    return next(row for row in _rows(plan, study) if row.number == trial.number)


def _rows(plan: SearchPlan, study: StoredStudy) -> list[TrialRow]:
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


def _report(plan: SearchPlan, study: StoredStudy, parent: ParentRun, console: Console) -> TrialRow | None:
    """Print and log what was found; return the fastest configuration that fits."""
    rows = _rows(plan, study)
    best = max((row for row in rows if row.fits), key=lambda row: row.tokens_per_second or 0, default=None)
    if not rows:
        return None
    console.print(trials_table(rows, best))
    parent.file("trials.csv", trials_frame(rows).to_csv(index=False))
    parent.file("figures/trials_over_time.png", over_time_figure(rows), "figures")
    parent.file("figures/memory_against_throughput.png", plane_figure(rows, plan.budget_bytes, best), "figures")
    answer = _answer(plan, rows, best)
    console.print(answer, highlight=False)
    parent.tags({"answer": answer})
    if best is not None:
        config = plan.experiment(dict(best.choice)).to_yaml()
        parent.file("best.yaml", config)
        Path("best.yaml").write_text(config)
        parent.metrics({f"best_{name}": value for name, value in best.figures.items()})
        console.print("run it: mlflow run . -P config=best.yaml", highlight=False)
    console.print(f"results: {parent.folder} and MLflow run {parent.run_id}", highlight=False)
    return best


def _answer(plan: SearchPlan, rows: list[TrialRow], best: TrialRow | None) -> str:
    """Return the answer in words."""
    budget, effective = plan.budget_bytes, plan.base.effective_batch_size
    space = f"{len(rows)} of {len(plan.space.choices)} configurations measured"
    if best is None:
        peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None and row.tokens_per_second is not None]
        smallest = f"the smallest peak seen is {min(peaks) / MIB:,.1f} MiB" if peaks else "none ran to its end"
        return f"Nothing fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {smallest} ({space})."
    peak, speed = best.peak_bytes or 0, best.tokens_per_second or 0
    text = (
        f"The fastest that fits {budget / MIB:,.1f} MiB at an effective batch of {effective}: {in_words(best.choice)}. "
        f"It peaks at {peak / MIB:,.1f} MiB ({(budget - peak) / MIB:,.1f} MiB of headroom) "
        f"and trains {speed:,.0f} tokens/s"
    )
    naive = _naive(plan)
    plain = next((row for row in rows if row.fits and dict(row.choice) in naive), None)
    if plain is best:
        text += ", and is the naive configuration itself"
    elif plain is not None and plain.tokens_per_second:
        text += f", {speed / plain.tokens_per_second:.2f} x the naive configuration ({in_words(plain.choice)})"
    if plan.settings.objectives == "pareto":
        front = "; ".join(f"{in_words(row.choice)}: {_measured(row)}" for row in pareto_front(rows))
        text += f". Pareto front: {front}"
    return f"{text} ({space})."


def _naive(plan: SearchPlan) -> list[Choice]:
    """Return what a person would try: the default precision, no checkpointing, the largest micro-batch first."""
    defaults = dict(dotted(AllSettings().model_dump()))
    return naive_choices(plan.space, {name: defaults[name] for name in plan.space.dimensions})


def _question(plan: SearchPlan) -> str:
    return (
        f"What is the fastest way to train {plan.base.settings.model} at an effective batch of "
        f"{plan.base.effective_batch_size} within {plan.budget_bytes / MIB:,.0f} MiB?"
    )


def _measured(row: TrialRow) -> str:
    if row.tokens_per_second is None or row.peak_bytes is None:
        return row.outcome
    return f"{row.outcome}, {row.peak_bytes / MIB:,.1f} MiB, {row.tokens_per_second:,.0f} tokens/s"


def _incumbent(rows: list[TrialRow]) -> str:
    best = max((row for row in rows if row.fits), key=lambda row: row.tokens_per_second or 0, default=None)
    return "nothing fits yet" if best is None else f"best {best.tokens_per_second:,.0f} tokens/s"
