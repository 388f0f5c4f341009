"""The findings of a job as JSON, from which its report can be made again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.base.errors import InvalidInputError
from pipeline.planning.plan import PlanFindings
from pipeline.prediction.commands.explanation import Explanation
from pipeline.prediction.commands.simulation import Simulation
from pipeline.report.comparison import ComparisonFindings, comparison_report
from pipeline.report.explanation import explanation_report
from pipeline.report.page import Headline, Report, Source
from pipeline.report.plan import plan_report
from pipeline.report.profile import ProfilingFindings, profiling_report
from pipeline.report.search import search_report
from pipeline.report.simulation import simulation_report
from pipeline.report.simulations import SimulationComparison, simulations_report
from pipeline.searching.results import SearchFindings
from pipeline.training.metrics import finite

FILE = "findings.json"
RUN, RUN_NAMES = "run", ("uri", "experiment_id", "run_id")
"""The field of the file that says where MLflow has the run, and what it has."""

Findings = (
    ComparisonFindings
    | Explanation
    | PlanFindings
    | ProfilingFindings
    | SearchFindings
    | Simulation
    | SimulationComparison
)
"""The findings of any job."""

REPORTS: dict[type[Any], Callable[[Any], Report]] = {
    ComparisonFindings: comparison_report,
    Explanation: explanation_report,
    PlanFindings: plan_report,
    ProfilingFindings: profiling_report,
    SearchFindings: search_report,
    Simulation: simulation_report,
    SimulationComparison: simulations_report,
}


def report_of(findings: Findings) -> Report:
    """Return the report of these findings; that of an interrupted job begins with how far it came."""
    make = next(REPORTS[kind] for kind in type(findings).__mro__ if kind in REPORTS)
    report, progress = make(findings), progress_of(findings)
    if progress is None:
        return report
    begin = f"Interrupted after {progress}."
    first = Headline(title="interrupted", value=progress, detail="the rest was not measured")
    return replace(
        report,
        answer=f"{begin} {report.answer}",
        lead=None if report.lead is None else f"{begin} {report.lead}",
        headlines=(first, *report.headlines),
    )


def progress_of(findings: Findings) -> str | None:
    """Return how far a job came that was interrupted; None for any other."""
    return getattr(findings, "interrupted", None)


def to_json(findings: Findings, source: Source | None = None) -> str:
    """Return the findings as JSON with their run in MLflow; infinity and NaN, which JSON lacks, are written as text."""
    content = TypeAdapter(type(findings)).dump_python(findings, mode="json")
    run = {} if source is None else {RUN: {name: getattr(source, name) for name in RUN_NAMES}}
    return json.dumps(finite({"kind": type(findings).__name__, **run, **content}), indent=1)


def read_findings(folder: Path) -> Findings:
    """Return the findings of the job whose files are in `folder`.

    Raises:
        InvalidInputError: the folder holds no findings, or they cannot be read.

    """
    file = folder / FILE
    kinds = {kind.__name__: kind for kind in REPORTS}
    try:
        content = json.loads(file.read_text())
        content.pop(RUN, None)
        found: Findings = TypeAdapter(kinds[content.pop("kind")]).validate_python(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FileNotFoundError):
            raise InvalidInputError(
                f"a report is made from the {FILE} of a finished job, and {file} does not exist; give a job's folder, "
                "such as runs/20260131-120000-combined-x1y2z3"
            ) from error
        raise InvalidInputError(
            f"{file} must be what this version of Fitproof writes, and cannot be read as that; its report.html is "
            "complete; for a new one run its command again, or use the version that wrote it (fitproof in "
            "environment.json)"
        ) from error
    return found


def read_source(folder: Path) -> Source | None:
    """Return the source of the findings in `folder`, which can be read; None if they do not name a run."""
    run = json.loads((folder / FILE).read_text()).get(RUN)
    return None if run is None else Source(folder=folder, **run)
