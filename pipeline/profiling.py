"""A job: one configuration looked at closely; measured as every run is, then taken apart in a process of its own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pipeline.contracts import Outcome, Result, StepRecord
from pipeline.environment import environment
from pipeline.execute import execute
from pipeline.experiment import Experiment
from pipeline.metrics import Row, Summary
from pipeline.profile import MemoryProfile, ProfileMessage, TimeProfile, look
from pipeline.report.advice import Profiled
from pipeline.tracking.parent import ParentRun, open_parent
from pipeline.variants import Plan

QUESTION = "Where are the memory and the time of {name}?"


def profiling(plan: Plan, console: Console) -> int:
    """Profile the one configuration of `plan`, print and log what it shows; return the exit code: 1 where it failed."""
    [variant] = plan.variants
    experiment = variant.experiment
    settings, about = experiment.settings, environment(experiment.device)
    heard: list[ProfileMessage] = []
    with open_parent(plan.entry, settings.model, settings.output) as parent:
        parent.params(experiment.params())
        parent.tags({"device": str(experiment.device)})
        parent.file("environment.json", json.dumps(about, indent=1))
        with console.status("measuring, then looking closely"):
            result, figures = parent.run(
                variant.name,
                experiment,
                partial(_figures, experiment),
                {"variant": variant.name},
                measure=partial(measure_and_look, heard=heard),
            )
        profiled = profiled_of(experiment, row_of(experiment, result, variant.name, figures), heard)
        _report(plan.entry, QUESTION.format(name=variant.name), profiled, about, parent, console)
        parent.succeeded = result.outcome.completed
    return 0 if parent.succeeded else 1


def _report(
    entry: str, question: str, profiled: Profiled, about: Mapping[str, str], parent: ParentRun, console: Console
) -> None:
    """Print and log what was found; what tables and pictures need is loaded here, when nothing waits for it."""
    from pipeline.publish import publish
    from pipeline.report.profiling import ProfilingFindings

    findings = ProfilingFindings(entry=entry, question=question, profiled=profiled, environment=about)
    publish(findings, {}, parent, console)


def row_of(experiment: Experiment, result: Result, name: str, figures: Mapping[str, float]) -> Row:
    """Return the line of the table that shows this run."""
    return Row(
        comparison="cost",
        name=name,
        is_baseline=True,
        params=experiment.params(),
        result=result,
        skipped=None,
        figures=figures,
    )


def profiled_of(experiment: Experiment, row: Row, heard: list[ProfileMessage]) -> Profiled:
    """Return what was heard, put together; of the memory, what was told last."""
    return Profiled(
        row=row,
        vocabulary_size=experiment.description.vocabulary_size or experiment.prepare().vocabulary_size,
        memory=next((part for part in reversed(heard) if isinstance(part, MemoryProfile)), None),
        time=next((part for part in heard if isinstance(part, TimeProfile)), None),
    )


def _figures(experiment: Experiment, result: Result) -> Summary:
    from pipeline.predict import summary  # when the training does not wait for it

    return summary(experiment, result)


def measure_and_look(
    experiment: Experiment, log_file: Path, on_step: Callable[[StepRecord], None], heard: list[ProfileMessage]
) -> Result:
    """Train as always, then take a few steps under the recorder and the profiler, whose messages go to `heard`."""
    result = execute(experiment, log_file, on_step)
    if result.outcome is Outcome.INTERRUPTED:
        return result
    traces = log_file.parent / "traces"
    traces.mkdir()
    looked = execute(experiment, traces / "log.txt", work=partial(look, folder=traces), on_other=heard.append)
    if looked.outcome is Outcome.OK or not result.outcome.completed:
        return result
    return replace(result, outcome=looked.outcome, detail=f"while being looked at: {looked.detail}")
