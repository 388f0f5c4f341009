"""The answer of a search: what was found, as a report and as the files that the user takes away."""

import contextlib
from pathlib import Path

from rich.console import Console

from pipeline.base.files import write_atomically
from pipeline.export.write import export_files
from pipeline.jobs.publish import publish
from pipeline.report.search import trials_frame
from pipeline.runtime.environment import environment
from pipeline.searching.certificate import Certificate
from pipeline.searching.problem import SearchProblem
from pipeline.searching.proposals import Proposer
from pipeline.searching.results import SearchFindings, Trial, Verification
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import rows_of
from pipeline.tracking.parent import ParentRun


def report(
    plan: SearchProblem,
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
    extra = verification.measurements if verification else ()
    findings = findings_of(plan, rows, proposer.certificate(rows, extra), verification)
    best = findings.best
    if best is not None:
        experiment = plan.experiment(dict(best.choice))
        config = experiment.to_yaml()
        parent.file("best.yaml", config)
        with contextlib.suppress(OSError):  # a convenience: the run's own folder has it too
            write_atomically(Path("best.yaml"), config.encode())
        for name, content in export_files(experiment).items():
            parent.file(f"handover/{name}", content, "handover")
        parent.metrics({f"best_{name}": value for name, value in best.metrics.items()})
    publish(findings, {"trials.csv": trials_frame(rows).to_csv(index=False)}, parent, console)
    if best is not None:
        console.print("run it: mlflow run . -P config=best.yaml", highlight=False)
    return findings


def findings_of(
    plan: SearchProblem,
    rows: list[Trial],
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
        notes=plan.notes,
        settings={name: value for name, value in plan.base.params().items() if name not in plan.space.dimensions},
        environment=environment(plan.base.device),
    )
