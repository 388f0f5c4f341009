"""`fitproof compare`: a report of runs that MLflow already has, side by side."""

import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import RESULTS, Settings
from pipeline.jobs.publish import publish
from pipeline.prediction.commands.simulation import Simulation
from pipeline.report.comparable import incomparable
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import FILE, read_findings
from pipeline.report.simulations import SimulationComparison
from pipeline.tracking.history import CONDITIONS, History, is_simulation
from pipeline.tracking.job import open_job
from pipeline.training.metrics import AGAINST_BASELINE, Row, against_baseline, common_settings
from pipeline.training.time_differences import with_times


class CompareSettings(Settings):
    """The settings of `compare`."""

    runs: str | None = None
    """Ids of MLflow runs, separated by commas; a parent's id stands for all of its children. Or of simulations."""
    experiment: str | None = None
    """Name of an MLflow experiment, whose measured runs are compared."""
    filter: str | None = None
    """MLflow filter string that selects among them: params.precision = 'bf16' and metrics.`loss/final` < 7."""
    baseline: str | None = None
    """Id of the run that the others are compared with; none: the first baseline of a job, else the first."""
    output: Path = RESULTS
    """Folder of the results on local disk."""


def compare(settings: CompareSettings, console: Console) -> int:
    """Print and log the report of runs selected by id, or by experiment and filter; return the exit code 0."""
    log_comparison(compare_runs(settings), settings.output, console)
    return 0


def compare_runs(settings: CompareSettings) -> ComparisonFindings | SimulationComparison:
    """Return the comparison of runs selected by id, or by experiment and filter; log nothing.

    Raises:
        InvalidInputError: the settings select no run, or contradict each other.

    """
    if settings.runs is None and settings.experiment is None and settings.filter is None:
        raise InvalidInputError(
            "compare needs runs: set runs=ID,ID, or experiment=NAME, or filter=\"tags.technique = 'x'\""
        )
    if settings.runs is not None and (settings.experiment is not None or settings.filter is not None):
        raise InvalidInputError("runs are selected by id, or by experiment and filter; set runs, or the other two")
    history = History()
    ids = [part.strip() for part in settings.runs.split(",") if part.strip()] if settings.runs else []
    if settings.runs is not None and not ids:
        raise InvalidInputError(
            f"runs must have an id, and is {settings.runs!r}; the MLflow UI shows those of all runs"
        )
    chosen = history.by_id(ids) if ids else history.by_filter(settings.experiment, settings.filter)
    if any(map(is_simulation, chosen)):
        return _compare_simulations(settings, history, chosen)
    rows = _rows(history, chosen, settings.baseline)
    return ComparisonFindings(
        entry="compare",
        question=f"How do these {len(rows)} runs compare?",
        rows=tuple(rows),
        environment=common_settings([_conditions(row) for row in rows]),
        sections=("differences",),
        run_ids=tuple(run.info.run_id for run in chosen),
    )


def log_comparison(findings: ComparisonFindings | SimulationComparison, output: Path, console: Console) -> None:
    """Print and log the report of a comparison, below the folder `output`."""
    if isinstance(findings, SimulationComparison):
        with open_job("compare", f"{len(findings.simulations)} simulations", output) as job:
            publish(findings, job, console)
        return
    with open_job("compare", f"{len(findings.rows)} runs", output) as job:
        job.tags({"runs": ", ".join(findings.run_ids)[:5000]})
        publish(findings, job, console)


def _compare_simulations(settings: CompareSettings, history: History, runs: Sequence[Any]) -> SimulationComparison:
    num_simulations = sum(map(is_simulation, runs))
    if num_simulations < max(2, len(runs)) or settings.baseline not in (None, runs[0].info.run_id):
        raise InvalidInputError(
            "simulations are compared with one another, two at least, and the first of them is the baseline; "
            f"{num_simulations} of these {len(runs)} runs are: leave out the others, and write the baseline first"
        )
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for run in runs:
            own = Path(folder, run.info.run_id)
            own.mkdir()
            history.file(run, FILE, own)
            one = cast(Simulation, read_findings(own))
            if one.largest is None:
                raise InvalidInputError(
                    f"simulations are compared by the memory of their cards, and the command of {run.info.run_name} "
                    f"({run.info.run_id}) ended before it used one; leave it out"
                )
            program, *words = one.command
            found[f"{shlex.join([Path(program).name, *words])} ({run.info.run_id[:6]})"] = one
    return SimulationComparison(simulations=found)


def _rows(history: History, runs: Sequence[Any], baseline: str | None) -> list[Row]:
    """Return the runs with the baseline first, the others measured against it where they compare."""
    ids = [run.info.run_id for run in runs]
    if baseline is not None and baseline not in ids:
        raise InvalidInputError(f"the baseline must be one of the runs compared, and {baseline!r} is not; leave it out")
    baselines = [run.info.run_id for run in runs if run.data.tags.get("baseline") == "true"]
    first = baseline or next(iter(baselines), ids[0])
    ordered = sorted(runs, key=lambda run: run.info.run_id != first)
    names = _names(ordered)
    found = [history.row(run, run.info.run_id == first, name, "runs") for run, name in zip(ordered, names, strict=True)]
    rows = with_times([_alone(row) for row in found])
    return [rows[0], *(_against(row, rows[0]) for row in rows[1:])]


def _conditions(row: Row) -> dict[str, str]:
    """Return the conditions under which a run was measured; what was not recorded is left out."""
    return {name: str(row.params[name]) for name in CONDITIONS if name in row.params}


def _names(runs: Sequence[Any]) -> list[str]:
    """Return unique names: with the technique if there are several, with the id if names repeat."""
    techniques = {run.data.tags.get("technique") for run in runs}
    names = [str(run.info.run_name) for run in runs]
    if len(techniques) > 1:
        names = [f"{run.data.tags.get('technique', '?')}: {name}" for run, name in zip(runs, names, strict=True)]
    count = Counter(names)
    return [
        name if count[name] == 1 else f"{name} {run.info.run_id[:6]}" for run, name in zip(runs, names, strict=True)
    ]


def _against(row: Row, baseline: Row) -> Row:
    """Return the row measured against this baseline, where the two compare."""
    if row.result is None or baseline.result is None or incomparable(row, baseline) - {"effective batch"}:
        return _alone(row)
    compared = against_baseline(row.result, row.metrics, baseline.result, baseline.metrics)
    return replace(row, metrics={**row.metrics, **compared})


def _alone(row: Row) -> Row:
    """Return the row without the metrics against the baseline of its own job."""
    return replace(row, metrics={name: value for name, value in row.metrics.items() if name not in AGAINST_BASELINE})
