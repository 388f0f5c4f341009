"""The entry point `search`: which configuration of a space is the fastest that fits a memory budget?"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.files import write_atomically
from pipeline.base.units import MIB
from pipeline.config.command import Command
from pipeline.config.experiment import Experiment
from pipeline.jobs.live_page import LivePage
from pipeline.jobs.notes import corpus_notes, published_type_note
from pipeline.jobs.printing import say, say_notes
from pipeline.jobs.search_progress import PREDICTING, SearchClock, SearchProgress
from pipeline.runtime.environment import environment
from pipeline.runtime.fork_server import loading
from pipeline.runtime.run import Execute
from pipeline.searching.candidates import Candidate, not_predicted_notes
from pipeline.searching.loop import Search, findings_of, search_and_verify
from pipeline.searching.problem import Problem
from pipeline.searching.proposals import make_proposer
from pipeline.searching.results import SearchFindings
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.session import session_of
from pipeline.searching.setup import make_sampler, open_workers, problem_of
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import Trial


def search(given: Mapping[str, Any], console: Console) -> int:
    """Search, print and log the answer; return the exit code: 1 if nothing fits the budget."""
    findings = run_search(given, console)
    return 1 if findings is None or findings.best is None else 0


def run_search(given: Mapping[str, Any], console: Console) -> SearchFindings | None:
    """Search, print and log the answer, and return the findings; None if nothing was measured.

    Raises:
        InvalidInputError: a setting is wrong, nothing is predicted to fit the budget, or a storage cannot be reached.

    """
    clock = SearchClock()
    problem = problem_of(given)
    of_corpus = corpus_notes(problem.base) if isinstance(problem.base, Experiment) else ()
    say_notes(console, (*problem.notes, *of_corpus))

    def predict(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        with clock.during(PREDICTING):
            return problem.predicted(candidates)

    with open_workers(problem) as executors:
        with loading("pipeline.tracking.job"):  # MLflow is imported while workers predict
            sampler = make_sampler(problem, predict)
        notes = not_predicted_notes(sampler.candidates) if sampler else ()
        say_notes(console, notes)
        return _measure(problem, sampler, (*problem.notes, *notes), executors, clock, console)


def _measure(
    problem: Problem,
    sampler: PredictiveSampler | None,
    said: Sequence[str],
    executors: Sequence[Execute],
    clock: SearchClock,
    console: Console,
) -> SearchFindings | None:
    """Measure, print and log the answer; `said` has the notes that were printed before."""
    from pipeline.tracking.job import open_job

    settings = problem.settings
    study = StoredStudy(settings.storage, settings.study, problem.directions, problem.identity, settings.worker_timeout)
    subject = f"{problem.base.title} in {problem.budget_bytes / MIB:,.0f} MiB"
    total = settings.num_trials
    with open_job("search", subject, problem.output, environment(problem.base.device)) as job, study.storage_errors():
        job.params({**problem.shared_params, **problem.settings.model_dump(mode="json")})
        job.tags({"device": str(problem.base.device), "study": study.name})
        study.announce(session_of(problem, study.name, job.manifest.run_id, job.manifest.uri))
        page = LivePage(job.folder, console)

        def write_page() -> None:
            if trials := one.trials:
                page.write(partial(_findings, one, trials, clock), f"{len(trials)} of at most {total} trials")

        shown = SearchProgress(console, total, clock, write_page, partial(job.children.lost, study.key))
        proposer = make_proposer(problem, study, sampler)
        one = Search(problem, study, proposer, job.folder, job.children.observer, shown, executors)
        interrupted = True
        try:
            configurations = f"{len(problem.space.choices):,} configurations"
            say(console, f"searching {configurations} in at most {total} trials; the study is {study.name}", "dim")
            with shown:
                search_and_verify(one)
            interrupted = False
        finally:
            findings = _report(one, clock, interrupted, said, job, console)
        job.succeeded = findings is not None and findings.best is not None
    return findings


def _findings(search: Search, trials: Sequence[Trial], clock: SearchClock) -> SearchFindings:
    """Return the findings of these trials and of the verifications so far."""
    certificate = search.proposer.certificate(trials, search.extra)
    found = findings_of(search.problem, [*trials, *search.extra], certificate, search.verification)
    return replace(found, notes=(*found.notes, *search.proposer.notes), seconds=clock.seconds)


def _report(
    search: Search, clock: SearchClock, interrupted: bool, said: Sequence[str], job: Any, console: Console
) -> SearchFindings | None:
    """Print and log what was found, and write the answer as files; return None if nothing was measured."""
    from pipeline.jobs.publish import publish

    problem, trials = search.problem, search.trials
    if not trials:
        return None
    findings = _findings(search, trials, clock)
    if interrupted:
        findings = replace(findings, interrupted=f"{len(trials)} of at most {problem.settings.num_trials} trials")
    if findings.best is not None:
        runnable = problem.runnable(dict(findings.best.choice))
        if isinstance(runnable, Command):
            findings = _write_command(runnable, findings, job)
        else:
            findings = _write_experiment(runnable, findings, job)
    publish(findings, job, console, said=said)
    return findings


def _write_experiment(experiment: Experiment, findings: SearchFindings, job: Any) -> SearchFindings:
    """Log best.yaml, and the files that train the answer in other frameworks; an export that fails is reported."""
    from pipeline.export.write import export_files
    from pipeline.report.page import HANDOVER

    _write(job, "best.yaml", experiment.to_yaml())
    note = published_type_note(experiment)
    notes = [f"the answer: {note}"] if note else []
    try:
        files = export_files(experiment)
    except Exception as error:  # whatever a technique's export() raises
        files = {}
        kind = "" if isinstance(error, InvalidInputError) else f"{type(error).__name__}: "
        notes.append(f"the answer cannot be exported: {kind}{first_line(error)}")
    for name, content in files.items():
        job.file(f"{HANDOVER}/{name}", content, HANDOVER)
    return replace(findings, notes=(*findings.notes, *notes))


def _write_command(command: Command, findings: SearchFindings, job: Any) -> SearchFindings:
    """Log the user's command with the best values, which reads the patched files of the current folder."""
    for path, text in command.files.items():
        _write(job, f"best-{command.copy_name(path)}", text)
    line = replace(command, words=command.with_names("best-")).line
    _write(job, "best.sh", f"{line}\n")
    return replace(findings, command=line)


def _write(job: Any, name: str, content: str) -> None:
    """Log a file, and write it into the current folder too."""
    job.file(name, content)
    with contextlib.suppress(OSError):  # a convenience: the job's own folder has it too
        write_atomically(Path(name), content.encode())
