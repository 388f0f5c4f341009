"""`fitproof simulate --gpu CARD -- COMMAND`: what a command needs of a card, found without the card."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import RESULTS, Settings
from pipeline.base.units import MIB, allowed_bytes
from pipeline.config.command_template import words_of
from pipeline.jobs.printing import say
from pipeline.memory import allocator_options
from pipeline.prediction.commands.ranks import simulate_ranks
from pipeline.prediction.commands.simulation import WORK_HOOK, Simulation, Verdict, what_runs
from pipeline.prediction.commands.simulation import simulate as simulate_one
from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import check_num_cards
from pipeline.simulation.run import Simulate, on_cuda_build

if TYPE_CHECKING:
    from pipeline.prediction.commands.explanation import Explanation
    from pipeline.tracking.job import Job

EXIT_CODE_DOES_NOT_FIT = 3
ALL_STEPS = "all"
ASYNC_ALLOCATOR = "cudaMallocAsync"
TIME_IS_NOT_KNOWN = (
    "The time of an optimizer step is not known: no step after those of --steps was counted to its end, or it has work "
    "that is not counted, such as a product in a kernel of Triton."
)


class SimulatedCommandSettings(Settings):
    """The settings of a command on a simulated card."""

    gpu: str
    """The card: a100, "RTX 4090", as nvidia-smi prints it, or in words: memory=31.7GiB,capability=7.0."""
    command: str
    """The command to simulate, as in a shell; on the command line it follows `--`."""
    gpus: PositiveInt = 1
    """Number of cards of the machine."""
    world_size: PositiveInt = 1
    """Number of ranks of which the command is one, on one card; the others are imagined."""
    rank: NonNegativeInt = 0
    """Which of world_size ranks the command is, counted from 0."""
    budget: str | None = None
    """What is free on each card beside its context, such as 16GiB; none: all of it."""
    other_processes: str | None = None
    """Memory of each card that other processes hold, such as 1.2GiB; none: nothing."""
    values: Literal["auto", "on", "off"] = "auto"
    """Whether small tensors are computed on the host too; auto: if the command's course may depend on them."""
    steps: str = "3"
    """Optimizer steps after which the command is ended, or all: it runs to its own end."""
    time_limit: PositiveFloat | None = None
    """Seconds after which the command is ended; none: no limit."""
    install: bool = False
    """Whether torch's CUDA build may be fetched (0.7 GB, 1.9 GB on disk) where the environment has a build for CPUs."""

    @field_validator("steps")
    @classmethod
    def _is_number_or_all(cls, value: str) -> str:
        if value != ALL_STEPS and not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"must be a number of optimizer steps from 1 on, or {ALL_STEPS}")
        return value


class SimulateSettings(SimulatedCommandSettings):
    """The settings of `simulate`."""

    ranks: Literal["one", "all"] = "one"
    """Which ranks of world_size run: the one that `rank` names, or all, of which equal neighbours run once."""
    smallest: bool = True
    """Whether the smallest memory on which the command runs is looked for, in two runs more."""
    step_time: bool = False
    """Whether the time of an optimizer step is estimated too, in one step more."""
    answer: Literal["text", "json"] = "text"
    """How the answer is written to stdout; json (or --json): as one object, and all else is written to stderr."""
    output: Path = RESULTS
    """Folder of the results on local disk."""


def simulate(settings: SimulateSettings, console: Console) -> int:
    """Simulate the command, print and log the answer; return 0 if it fits, 3 if not, 1 if it failed for another reason.

    Raises:
        InvalidInputError: a setting is wrong, or the command uses no card.

    """
    with only_answer_on_stdout(settings.answer):
        found = _log_simulation(settings, console)
    if settings.answer == "json":
        print(json.dumps(content_of(found)))  # noqa: T201
    return _exit_code(found)


def _log_simulation(settings: SimulateSettings, console: Console) -> Simulation:
    jobs: list[Job] = []
    with ExitStack() as stack:

        def open_meanwhile() -> None:
            """Load MLflow and the reports, and open the job, while the command runs in its own process."""
            if not jobs:
                import pipeline.jobs.publish  # noqa: F401
                from pipeline.tracking.job import open_job

                jobs.append(stack.enter_context(open_job("simulate", settings.command[:100], settings.output)))

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fitproof-")))
        found = run_simulation(settings, folder, partial(say, console), open_meanwhile)
        _publish(found, settings, folder, jobs[0], console)
    return found


def _publish(found: Simulation, settings: SimulateSettings, folder: Path, job: "Job", console: Console) -> None:
    from pipeline.jobs.publish import publish

    job.params(settings.model_dump(mode="json", exclude={"answer", "output"}, exclude_none=True))
    for snapshot in sorted(folder.glob("memory_snapshot_*.pickle")):
        job.file(snapshot.name, snapshot.read_bytes())
    publish(found, job, console)
    job.tags({"verdict": found.verdict.value, "with_values": str(found.with_values).lower()})
    job.succeeded = _exit_code(found) != 1


def content_of(found: "Simulation | Explanation") -> dict[str, Any]:
    """Return what was found as an object for JSON, without the courses of memory: a number for each allocation."""
    from pipeline.report.findings import to_json

    content: dict[str, Any] = json.loads(to_json(found))
    for process in content.get("simulation", content)["processes"]:
        del process["course"]
    return content


@contextmanager
def only_answer_on_stdout(form: str) -> Iterator[None]:
    """Unless an answer is text, write to stderr what this process and those that it starts write to stdout."""
    if form == "text":
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):  # which need not be the file that those write to, as in a notebook
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run_simulation(
    settings: SimulateSettings,
    folder: Path,
    say: Callable[[str], None],
    meanwhile: Callable[[], None] | None = None,
) -> Simulation:
    """Simulate the command and return what it needs; its memory snapshots are left in `folder`.

    `meanwhile` is called each time that the command has been started.

    Raises:
        InvalidInputError: a setting is wrong, or the command uses no card.

    """
    _check(settings)
    wanted = replace(wanted_run(settings), meanwhile=meanwhile, hook=WORK_HOOK if settings.step_time else None)
    say(what_runs(wanted))
    run = simulate_ranks if settings.ranks == "all" else simulate_one
    may_need_values = settings.values == "auto"
    found = run(wanted, folder, say, may_need_values=may_need_values, finds_smallest=settings.smallest)
    if wanted.hook and found.largest and found.update_work is None:
        found = replace(found, notes=(*found.notes, TIME_IS_NOT_KNOWN))
    settings_of_run = SimulateSettings.model_fields.keys() - {"gpu", "command", "answer", "output"}
    return replace(found, given=settings.model_dump(mode="json", include=settings_of_run, exclude_defaults=True))


def _check(settings: SimulateSettings) -> None:
    """Refuse a rank that is named beside all, or that has no others, and steps that leave none to be timed."""
    if settings.ranks == "all" and settings.world_size == 1:
        raise InvalidInputError(
            "ranks=all runs the command as each of several ranks, and world_size is 1; set --world_size to their number"
        )
    if settings.ranks == "all" and settings.rank:
        raise InvalidInputError(
            f"ranks=all runs every rank, and rank names one of them and is {settings.rank}; leave out --rank or --ranks"
        )
    if settings.step_time and settings.steps == ALL_STEPS:
        raise InvalidInputError(
            f"step_time looks at the step after those of steps, which is {ALL_STEPS}; set --steps to a number, as 3"
        )


def _check_allocator() -> None:
    """Refuse CUDA's own allocator, of which torch keeps no history."""
    for name in allocator_options.VARIABLES:
        value = os.environ.get(name, "")
        if ASYNC_ALLOCATOR in value:
            raise InvalidInputError(
                f"the allocator must be torch's own, whose memory history is read, and {name} is {value}; leave out "
                f"backend:{ASYNC_ALLOCATOR}"
            )


def wanted_run(settings: SimulatedCommandSettings) -> Simulate:
    """Return the command and the cards on which it is to run.

    Raises:
        InvalidInputError: a setting is wrong.

    """
    words = words_of(settings.command)
    if not words:
        raise InvalidInputError(
            "simulate needs a command; write it behind --: fitproof simulate --gpu t4 -- python train.py"
        )
    if settings.rank >= settings.world_size:
        raise InvalidInputError(
            f"rank counts from 0 to world_size - 1, which is {settings.world_size - 1}, and is {settings.rank}; "
            "set --world_size to the number of ranks, or another rank"
        )
    _check_allocator()
    check_num_cards(settings.gpus)
    if settings.world_size > 1 and settings.gpus > 1:
        raise InvalidInputError(
            f"one of {settings.world_size} ranks has one card, and gpus is {settings.gpus}; leave out --gpus, or "
            "leave out --world_size and start a process for each card"
        )
    card = find_card(settings.gpu)
    budget_bytes = None
    if settings.budget is not None or settings.other_processes is not None:
        memory_bytes, context_bytes = card.memory_mib * MIB, card.context.mib * MIB
        budget_bytes = allowed_bytes(settings.budget, settings.other_processes, memory_bytes, context_bytes)
    return Simulate(
        command=on_cuda_build(words, settings.install),
        card=card,
        num_cards=settings.gpus,
        world_size=settings.world_size,
        rank=settings.rank,
        budget_bytes=budget_bytes,
        values=settings.values == "on",
        num_steps=None if settings.steps == ALL_STEPS else int(settings.steps),
        time_limit_seconds=settings.time_limit,
    )


def _exit_code(found: Simulation) -> int:
    return {Verdict.FITS: 0, Verdict.DOES_NOT_FIT: EXIT_CODE_DOES_NOT_FIT, Verdict.NONE: 1}[found.verdict]
