"""The entry point `profiling`: where are the memory and the time of one configuration?"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.progress import progress
from pipeline.config.experiment import Experiment
from pipeline.config.variants import load_single
from pipeline.jobs.comparison import StepProgress, summarize
from pipeline.jobs.notes import corpus_notes
from pipeline.jobs.printing import say, say_notes
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.run import run
from pipeline.runtime.run_folder import folder_name
from pipeline.runtime.shape_check import check_shapes
from pipeline.tracking.job import open_job
from pipeline.training.metrics import Row
from pipeline.training.profiler import MemoryProfile, TimeProfile, profile_run

if TYPE_CHECKING:
    from pipeline.jobs.advice import ProfiledRun
    from pipeline.report.profile import ProfilingFindings


def profiling(given: Mapping[str, Any], console: Console) -> int:
    """Profile, print and log the report; return the exit code: 1 if the run failed."""
    return 0 if run_profiling(given, console).row.completed else 1


def run_profiling(given: Mapping[str, Any], console: Console) -> "ProfilingFindings":
    """Profile the one configuration of these settings, print and log the report, and return the findings.

    Raises:
        InvalidInputError: a setting is wrong, or it has several processes.

    """
    plan = load_single("profiling", given)
    [variant] = plan.variants
    experiment = variant.experiment
    if experiment.world_size > 1:
        raise InvalidInputError(
            f"profiling looks at one process, and world_size is {experiment.world_size}; set world_size=1, and "
            "effective_batch_size to that of one process"
        )
    check_shapes([experiment])
    settings, about = experiment.settings, environment(experiment.device)
    say_notes(console, corpus_notes(experiment))
    with open_job(plan.entry, settings.model, settings.output, about) as job:
        job.params(experiment.params())
        job.tags({"device": str(experiment.device)})
        num_steps = settings.num_steps
        say(console, f"training {num_steps} optimizer steps, then recording memory and time in a few more", "dim")
        with progress(variant.name, num_steps) as advance:
            observers = [job.children.observer(), _Progress(advance, num_steps)]
            folder = job.folder / folder_name(variant.name)
            row, profile = measure_and_profile(experiment, variant.name, folder, observers)
        with progress("making the report"):  # pandas and Altair are imported here, after the runs
            from pipeline.jobs.advice import advise
            from pipeline.jobs.publish import publish
            from pipeline.report.profile import ProfilingFindings

            findings = ProfilingFindings(
                entry=plan.entry,
                question=f"Where are the memory and the time of {variant.name}?",
                row=row,
                memory=profile.memory_profile,
                time=profile.time_profile,
                advice=advise(profiled_of(experiment, row, profile)),
                environment=about,
            )
        publish(findings, job, console)
        job.succeeded = row.completed
    return findings


class _Progress(StepProgress):
    """Reports the optimizer steps, then what is recorded."""

    def message(self, message: Any) -> None:
        """Report that a profile has arrived."""
        self._advance(0, "recording memory" if isinstance(message, MemoryProfile) else "recording time")


class Profile(Observer):
    """Collects the profiler's events: the memory after every phase, which a failed run keeps, then the time."""

    def __init__(self) -> None:
        self.memory_profile: MemoryProfile | None = None
        """The last one received."""
        self.time_profile: TimeProfile | None = None

    def message(self, message: Any) -> None:
        """Receive a profile."""
        if isinstance(message, MemoryProfile):
            self.memory_profile = message
        elif isinstance(message, TimeProfile):
            self.time_profile = message


def measure_and_profile(
    experiment: Experiment, name: str, folder: Path, observers: Sequence[Observer]
) -> tuple[Row, Profile]:
    """Train as every run does, then take a few steps under the recorder and the profiler in a process of its own."""
    profile = Profile()
    this = Run(name=name, runnable=experiment, folder=folder, labels={"variant": name})
    work = partial(profile_run, folder=folder / "traces")
    result, summary = run(this, [*observers, profile], then=work, summarize=partial(summarize, experiment, None))
    row = Row(
        comparison="cost",
        name=name,
        is_baseline=True,
        params=experiment.params(),
        result=result,
        skipped=None,
        metrics=summary.metrics,
        prediction=summary.prediction,
    )
    return row, profile


def profiled_of(experiment: Experiment, row: Row, profile: Profile) -> "ProfiledRun":
    """Return what the advice is derived from."""
    from pipeline.jobs.advice import ProfiledRun

    chunked, bf16, checkpointed = (
        Experiment(experiment.settings.model_copy(update=change))
        for change in ({"loss_kernel": "chunked"}, {"precision": "bf16"}, {"checkpointing": "every_layer"})
    )
    return ProfiledRun(
        row=row,
        vocabulary_size=experiment.description.vocabulary_size or experiment.prepare().vocabulary_size,
        can_chunk_loss=experiment.params()["loss_kernel"] == "full" and chunked.unsupported() is None,
        can_checkpoint=checkpointed.unsupported() is None,
        autocast="bf16" if bf16.unsupported() is None else "fp16",
        memory=profile.memory_profile,
        time=profile.time_profile,
    )
