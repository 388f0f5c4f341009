"""A job: one configuration looked at closely; measured as every run is, then taken apart in a process of its own."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from pipeline.base.results import Outcome, Result, StepRecord
from pipeline.config.experiment import Experiment
from pipeline.config.variants import EntryPoint
from pipeline.jobs.advice import Profiled, advise
from pipeline.report.profile import ProfilingFindings
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.runtime.shape_check import check_shapes
from pipeline.tracking.parent import ParentRun, open_parent
from pipeline.training.metrics import Row, Summary
from pipeline.training.profiler import MemoryProfile, ProfileMessage, TimeProfile, look

QUESTION = "Where are the memory and the time of {name}?"


def profiling(plan: EntryPoint, console: Console) -> int:
    """Profile the one configuration of `plan`, print and log what it shows; return the exit code: 1 where it failed."""
    [variant] = plan.variants
    experiment = variant.experiment
    check_shapes([experiment])
    settings, about = experiment.settings, environment(experiment.device)
    received: list[ProfileMessage] = []
    with open_parent(plan.entry, settings.model, settings.output) as parent:
        parent.params(experiment.params())
        parent.tags({"device": str(experiment.device)})
        parent.file("environment.json", json.dumps(about, indent=1))
        with console.status("measuring, then looking closely"):
            result, metrics = parent.run(
                variant.name,
                experiment,
                partial(_summarize, experiment),
                {"variant": variant.name},
                measure=partial(measure_and_look, received=received),
            )
        profiled = profiled_of(experiment, row_of(experiment, result, variant.name, metrics), received)
        _report(plan.entry, QUESTION.format(name=variant.name), profiled, about, parent, console)
        parent.succeeded = result.outcome.completed
    return 0 if parent.succeeded else 1


def _report(
    entry: str, question: str, profiled: Profiled, about: Mapping[str, str], parent: ParentRun, console: Console
) -> None:
    """Print and log what was found; what tables and pictures need is loaded here, when nothing waits for it."""
    from pipeline.jobs.publish import publish

    publish(findings_of(entry, question, profiled, about), {}, parent, console)


def findings_of(entry: str, question: str, profiled: Profiled, about: Mapping[str, str]) -> ProfilingFindings:
    """Return what the report is made from."""
    return ProfilingFindings(
        entry=entry,
        question=question,
        row=profiled.row,
        memory=profiled.memory,
        time=profiled.time,
        advice=advise(profiled),
        environment=about,
    )


def row_of(experiment: Experiment, result: Result, name: str, metrics: Mapping[str, float]) -> Row:
    """Return the line of the table that shows this run."""
    return Row(
        comparison="cost",
        name=name,
        is_baseline=True,
        params=experiment.params(),
        result=result,
        skipped=None,
        metrics=metrics,
    )


def profiled_of(experiment: Experiment, row: Row, received: list[ProfileMessage]) -> Profiled:
    """Return what was heard, put together; of the memory, what was told last."""
    return Profiled(
        row=row,
        vocabulary_size=experiment.description.vocabulary_size or experiment.prepare().vocabulary_size,
        memory=next((part for part in reversed(received) if isinstance(part, MemoryProfile)), None),
        time=next((part for part in received if isinstance(part, TimeProfile)), None),
    )


def _summarize(experiment: Experiment, result: Result) -> Summary:
    from pipeline.prediction.summary import summary

    return summary(experiment, result)


def measure_and_look(
    experiment: Experiment, log_file: Path, on_step: Callable[[StepRecord], None], received: list[ProfileMessage]
) -> Result:
    """Train as always, then take a few steps under the recorder and the profiler, whose messages go to `heard`."""
    result = execute(experiment, log_file, on_step)
    if result.outcome is Outcome.INTERRUPTED:
        return result
    traces = log_file.parent / "traces"
    traces.mkdir()
    looked = execute(experiment, traces / "log.txt", work=partial(look, folder=traces), on_other=received.append)
    if looked.outcome is Outcome.OK or not result.outcome.completed:
        return result
    return replace(result, outcome=looked.outcome, detail=f"while being looked at: {looked.detail}")
