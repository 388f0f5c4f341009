"""A command on simulated cards: its process, its time limit, and the records that its processes leave."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import kill_family, kill_those_with, unreadable
from pipeline.base.units import MIB
from pipeline.simulation.cards import UNLIMITED_MIB, Card
from pipeline.simulation.environment import environment, is_python, is_script, python_of
from pipeline.simulation.hook import objects, ranks
from pipeline.simulation.install import install, installed
from pipeline.simulation.peers import SECONDS_TO_END, Peers
from pipeline.simulation.process import watch
from pipeline.simulation.record import Record, read_records
from pipeline.simulation.report import Process, has_steering_read, read_report
from pipeline.simulation.torch_build import CpuBuildError, find_torch

OPERATORS = Path(watch.__file__).with_name("operators.py")
"""A hook that notes the operator whose allocation fails; it imports torch itself, so this process does not."""
NO_KERNELS = "has no kernels for"
GRACE_SECONDS = 30.0
"""How long after its time limit a process may take to write its record."""
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """A command, and the cards on which it is to run."""

    command: tuple[str, ...]
    card: Card
    num_cards: int = 1
    budget_bytes: int | None = None
    """What is free on each card beside its context; None: all of it."""
    world_size: int = 1
    """Number of ranks of which the command is one, and all others are imagined."""
    rank: int = 0
    values: bool = False
    """Whether small tensors are computed on the host too, for commands whose course depends on their values."""
    has_largest_workspaces: bool = False
    """Whether cuDNN takes the largest workspaces that it may, not those that it mostly does; only it knows them."""
    num_steps: int | None = 3
    """Optimizer steps after which each process ends; None: it runs to its own end."""
    time_limit_seconds: float | None = None
    stop: Event | None = None
    """Ends it, and whatever would run after it, once it is set."""
    meanwhile: Callable[[], None] | None = None
    """Called each time that it has been started; an error ends it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment, beside those of this process."""
    hook: Path | None = None
    """A Python file that its processes run once torch is imported, as OPERATORS; they are slower then."""
    objects: Path | None = None
    """Existing folder for the Python objects that ranks send each other, for runs that share them; None: each run's."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What became of the command."""

    exit_code: int
    records: tuple[Record, ...]
    """Of the processes whose torch asked for a card's memory, by rank."""
    processes: tuple[Process, ...]
    """What each process did on its card, also one without torch, as the card counted it."""
    folder: Path
    """Where they recorded it."""
    was_late: bool = False
    """Whether it ended at its time limit, or later."""

    @property
    def shortfall(self) -> str | None:
        """Why its memory is not known, though the command did not fail itself; None if it is known, or it failed."""
        if self.was_late and self.exit_code in (-signal.SIGKILL, -signal.SIGTERM):
            return "the time limit ended it before it had written its record"
        if self.exit_code != 0:
            return None
        cut = [len(record.steps) for record in self.records if "limit" in record.ended_by]
        if min(cut, default=watch.FEWEST_STEPS) < watch.FEWEST_STEPS:
            return f"the time limit ended it after {min(cut)} optimizer steps; the peak is known after two"
        if any(record.is_out_of_memory is not None for record in self.records):
            return "an error ended one of its processes, and the command went on"
        if any(record.has_late_optimizer for record in self.records):
            return "one of its optimizers took too few steps"
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the command ran without an error, and long enough for its memory to be known."""
        return self.exit_code == 0 and self.shortfall is None


def on_cuda_build(command: Sequence[str], may_install: bool) -> tuple[str, ...]:
    """Return the command as it runs on a CUDA build of torch.

    A command of this environment, if that has a build for CPUs, is run by the interpreter of an environment with the
    same packages and the CUDA build: the one that `install` has made, or makes if it may.

    Raises:
        InvalidInputError: there is no such command, it runs no Python, or its environment has no CUDA build of torch.

    """
    python = python_of(command)
    try:
        find_torch(python)
    except CpuBuildError as error:
        if python.parent.resolve() != Path(sys.executable).parent.resolve():
            raise InvalidInputError(f"{error}; install one there, such as that of PyPI for Linux") from None
        if not (may_install or installed()):
            raise InvalidInputError(
                f"{error}; add --install true, which makes an environment with it (0.7 GB to fetch, once), or install "
                "one"
            ) from None
        program = str(shutil.which(command[0]))
        if is_python(program):
            return (str(install()), *command[1:])
        if is_script(Path(program)):
            return (str(install()), program, *command[1:])
        raise InvalidInputError(
            f"where torch is a build for CPUs, the command must be Python or a script of it, and {command[0]!r} starts "
            "Python on its own; write what it starts, as python train.py or python -m torch.distributed.run train.py, "
            "with variables in front: A=1 fitproof ..."
        ) from None
    return tuple(command)


def note_on_kernels(wanted: Simulate) -> str | None:
    """Return that the command's torch has no kernels for the card, on which it would fail; None if it has them."""
    torch, (major, minor) = find_torch(python_of(wanted.command)), wanted.card.capability
    built_for = [divmod(int(number), 10) for number in torch.capabilities().split(",")]
    if any(own_major == major and own_minor <= minor for own_major, own_minor in built_for):
        return None
    shown = ", ".join(f"{own_major}.{own_minor}" for own_major, own_minor in built_for)
    return (
        f"torch {torch.version} {NO_KERNELS} {wanted.card.name}: it was built for the compute capabilities {shown}, "
        f"and the card has {major}.{minor}. There it would fail (no kernel image is available); the answer is of a "
        "build that has them and allocates the same."
    )


def run_command(
    wanted: Simulate, folder: Path, log: Path | None = None, *, ends_at_steering_read: bool = False
) -> SimulatedRun:
    """Run the command to its end and return what its processes recorded in `folder`, which must be empty.

    Its output goes where that of this process goes, or into the file `log`. It is killed once it has read what is not
    known and may steer it, if `ends_at_steering_read`.

    Raises:
        InvalidInputError: there is no such command, or no simulated card in its environment.

    """
    end = None if wanted.time_limit_seconds is None else time.time() + wanted.time_limit_seconds
    sent = wanted.objects or folder
    wanted = replace(wanted, objects=sent)
    peers = Peers(sent, lambda rank: _start_peer(replace(wanted, rank=rank), sent / f"rank_{rank}", end))
    latest = math.inf if end is None else end + GRACE_SECONDS

    def is_over() -> bool:
        if wanted.world_size > 1:
            peers.look()
        is_stopped = wanted.stop is not None and wanted.stop.is_set()
        return is_stopped or time.time() > latest or (ends_at_steering_read and has_steering_read(folder))

    try:
        exit_code = _wait(_start(wanted, folder, log, end), is_over, wanted.meanwhile)
    finally:
        peers.end()
        kill_those_with(watch.FOLDER, str(folder.absolute()))  # what it has started and not ended
    return SimulatedRun(
        exit_code=exit_code,
        records=tuple(one for one in read_records(folder) if one.has_allocated or one.out_of_memory),
        processes=read_report(folder),
        folder=folder,
        was_late=end is not None and time.time() >= end,
    )


def with_room(wanted: Simulate, num_bytes: int | None = None) -> Simulate:
    """Return the same on a card with memory for every training, or with so much, the context included."""
    budget_bytes = None if num_bytes is None else num_bytes - wanted.card.context.mib * MIB
    return replace(wanted, card=replace(wanted.card, memory_mib=UNLIMITED_MIB), budget_bytes=budget_bytes)


def _start_peer(wanted: Simulate, folder: Path, end: float | None) -> "subprocess.Popen[bytes]":
    """Start another rank for what it sends, with room for it."""
    folder.mkdir(exist_ok=True)
    return _start(with_room(wanted), folder, folder.with_suffix(".log"), end)


def _start(wanted: Simulate, folder: Path, log: Path | None, end: float | None) -> "subprocess.Popen[bytes]":
    """Start the command, whose processes record in `folder`."""
    assert wanted.objects is not None
    own = {
        objects.FOLDER: str(wanted.objects.absolute()),
        **({} if wanted.world_size == 1 else {ranks.RANK: f"{wanted.rank}/{wanted.world_size}", "LOCAL_RANK": "0"}),
        **({"SIMULATED_CARD_WORKSPACES": "largest"} if wanted.has_largest_workspaces else {}),
        **({} if wanted.num_steps is None else {watch.STEPS: str(wanted.num_steps)}),
        **({} if end is None else {watch.TIME_LIMIT: str(end)}),
    }
    base = {**os.environ, **wanted.variables, **own}
    hooks = [
        *([Path(ranks.__file__)] if wanted.world_size > 1 else []),
        Path(objects.__file__),
        Path(watch.__file__),
        *([wanted.hook] if wanted.hook else []),
    ]
    card = environment(
        wanted.card,
        python=python_of(wanted.command),
        num_cards=wanted.num_cards,
        budget_bytes=wanted.budget_bytes,
        report=folder,
        values=wanted.values,
        hooks=hooks,
        base=base,
    )
    with ExitStack() as stack:  # where nobody sees what it asks, neither input() nor getpass is to wait
        stdin = stack.enter_context(unreadable())
        output = None if log is None else stack.enter_context(log.open("wb"))
        try:
            return subprocess.Popen(
                wanted.command,
                env={**base, **card},
                stdin=None if output is None else stdin,
                stdout=output,
                stderr=output,
                start_new_session=output is not None,
            )
        except OSError as error:
            raise InvalidInputError(
                f"the command must be a program, and {wanted.command[0]} cannot be started ({error.strerror}); name "
                "its interpreter, as in bash train.sh"
            ) from error


def _wait(process: "subprocess.Popen[bytes]", is_over: Callable[[], bool], meanwhile: Callable[[], None] | None) -> int:
    """Return the exit code; the process is killed with its own once `is_over`, or if this one is interrupted."""
    try:
        if meanwhile is not None:
            meanwhile()
        while not is_over():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(SECONDS_BETWEEN_LOOKS)
        kill_family(process.pid, SECONDS_TO_END)
        return process.wait()
    except BaseException:
        kill_family(process.pid, SECONDS_TO_END)
        process.wait()
        raise
