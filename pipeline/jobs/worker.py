"""`fitproof worker`: measures trials of a search that runs in another process, until it is done."""

import socket
from functools import partial
from pathlib import Path

from pydantic import Field, PositiveInt
from rich.console import Console

from pipeline.base.settings import RESULTS, Settings
from pipeline.jobs.printing import say_notes
from pipeline.jobs.search_progress import TrialLines
from pipeline.runtime.fork_server import start_server
from pipeline.searching.candidates import not_predicted_notes
from pipeline.searching.loop import Search, run_trials
from pipeline.searching.proposals import make_proposer
from pipeline.searching.session import read_session
from pipeline.searching.settings import SearchSettings
from pipeline.searching.setup import local_workers, make_sampler, problem_of
from pipeline.searching.study import StoredStudy

SAME_MACHINE = (
    "The search was started on this machine too: on one device both slow each other's trials and share its memory. "
)
OWN_DEVICES = {
    "cpu": "Give each cores of its own, as many as the search has, as with taskset -c 0-3.",
    "cuda": "Give each GPUs of its own with CUDA_VISIBLE_DEVICES.",
}
"""How both have devices of their own, by kind of device."""


class WorkerSettings(Settings):
    """The settings of `worker`."""

    study: str = Field(min_length=1)
    """Name of the study, which the search prints."""
    storage: str = SearchSettings.model_fields["storage"].default
    """URL of the Optuna storage that keeps the study."""
    workers: PositiveInt | None = None
    """Trials at the same time on this machine, each on GPUs of its own; none: as many as there are groups of visible
    GPUs for the largest world_size, one on a CPU."""
    output: Path = RESULTS
    """Folder for the results of the trials of this machine."""


def worker(settings: WorkerSettings, console: Console) -> int:
    """Measure trials until the search needs no more, and return the exit code 0.

    Raises:
        InvalidInputError: the study does not exist, or this machine, its versions or its device are not those of the
            study; the storage or the tracking store cannot be reached.

    """
    start_server()
    session = read_session(settings.storage, settings.study)
    here = {"storage": settings.storage, "workers": settings.workers, "output": str(settings.output)}
    problem = problem_of({**session.settings, **here})
    executors = local_workers(problem)
    sampler = make_sampler(problem)
    say_notes(console, not_predicted_notes(sampler.candidates) if sampler else ())
    study = StoredStudy(
        settings.storage, settings.study, problem.directions, problem.identity, problem.settings.worker_timeout
    )
    from pipeline.tracking.job import join_job

    joined = join_job(session.run_id, session.tracking_uri, settings.output)
    with joined as (folder, children), study.storage_errors():
        proposer = make_proposer(problem, study, sampler)
        lines = TrialLines(console, partial(children.lost, study.key))
        search = Search(problem, study, proposer, folder, children.observer, lines, executors)
        if session.host == socket.gethostname():
            say_notes(console, (SAME_MACHINE + OWN_DEVICES[problem.base.device.type],))
        console.print(f"measuring trials of {settings.study}, {len(executors)} at a time", highlight=False)
        run_trials(search, session.deadline)
    console.print(f"the search needs no further trial; results: {folder}", highlight=False)
    return 0
