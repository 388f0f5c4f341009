"""`fitproof explain < log.txt`: what an out-of-memory message says, and which change of its command fits."""

import json
import shlex
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import RESULTS, Settings
from pipeline.base.units import MIB
from pipeline.config.given import validate
from pipeline.jobs.printing import say
from pipeline.jobs.simulate import (
    EXIT_CODE_DOES_NOT_FIT,
    SimulatedCommandSettings,
    content_of,
    only_answer_on_stdout,
    wanted_run,
)
from pipeline.memory.out_of_memory import Messages, OutOfMemoryMessage, Place, read_messages
from pipeline.simulation.cards import CARDS, TABLE, Card, Context
from pipeline.simulation.run import Simulate

if TYPE_CHECKING:
    from pipeline.prediction.commands.explanation import Explanation

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How a text begins that PowerShell has written."""
SAME_CARD = 0.01
"""Cards of one model have memories that differ by no more than this share, with the driver and its settings."""
NUM_CLOSE = 3
"""Cards that are named where none has the memory of the message."""
LOOKED_FOR = (
    "torch's `CUDA out of memory. Tried to allocate ...`, `CUDA error: out of memory`, errors of allocation of cuBLAS, "
    "cuDNN, cuSOLVER, cuFFT and NCCL, bitsandbytes' `Error out of memory at line ...`, and `DefaultCPUAllocator: can't "
    "allocate memory`"
)


class ExplainSettings(Settings):
    """The settings of `explain`."""

    message: str | None = None
    """The message, or the file of a log that has it; also without a name. none: the log is read from stdin."""
    command: str | None = None
    """The command that ran out of memory; it follows `--`. {batch:8,4,2} marks a value and others to try."""
    gpu: str | None = None
    """Name of the card, such as rtx4090 or a100; none: the one with the memory that the message names."""
    levers: dict[str, list[Any]] | None = None
    """Options of the command with the values to try, the smallest change first: {"batch": [4, 2]}."""
    gpus: PositiveInt = 1
    """Number of cards of the machine."""
    world_size: PositiveInt = 1
    """Number of ranks of which the command is one, on one card; the others are imagined."""
    rank: NonNegativeInt = 0
    """Which of world_size ranks the command is, counted from 0."""
    values: Literal["auto", "on", "off"] = "auto"
    """Whether small tensors are computed on the host too; auto: if the command's course may depend on them."""
    steps: str = "3"
    """Optimizer steps after which the command is ended, or all: it runs to its own end."""
    time_limit: PositiveFloat | None = None
    """Seconds after which each run of the command is ended; none: no limit."""
    install: bool = False
    """Whether torch's CUDA build may be fetched (0.7 GB, 1.9 GB on disk) where the environment has a build for CPUs."""
    answer: Literal["text", "json"] = "text"
    """How the answer is written to stdout; json (or --json): as one object, and all else is written to stderr."""
    output: Path = RESULTS
    """Folder of the results on local disk."""


def explain(settings: ExplainSettings, console: Console) -> int:
    """Say what the message says; simulate the command, if there is one, and say what fits.

    Return 0 if the message is explained, and with a command if a change fits; 3 if none does; 1 if the command does not
    run out of memory in the simulation, or is not simulated.

    Raises:
        InvalidInputError: there is no message, a setting is wrong, or the command uses no card.

    """
    log = _log(settings)
    messages = read_messages(log)
    if not messages.first:
        if log and log == settings.message and not log.split()[1:]:
            raise InvalidInputError(
                f"explain needs an out-of-memory message or the file of a log, and {log!r} is neither; name the file "
                "with its folder, or give the log on stdin: fitproof explain < log.txt"
            )
        raise InvalidInputError(
            f"the log must have an out-of-memory message, and none was found; looked for are {LOOKED_FOR}: give the "
            "whole log, as in fitproof explain < log.txt"
        )
    with only_answer_on_stdout(settings.answer):
        _show(messages, console)
        found = _of_command(settings, messages, console) if settings.command else None
    if settings.answer == "json":
        print(json.dumps(_content(messages) if found is None else content_of(found)))  # noqa: T201
    return _exit_code(found) if settings.command else 0


def _log(settings: ExplainSettings) -> str:
    if settings.message is not None:
        with suppress(OSError, ValueError):  # no path has so many characters, or such
            if Path(settings.message).is_file():
                return _text(Path(settings.message).read_bytes())
        return settings.message
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidInputError(
            "explain needs the message: give it as an argument, fitproof explain 'CUDA out of memory. Tried ...', or "
            "the log on stdin, fitproof explain < log.txt"
        )
    return _text(sys.stdin.buffer.read())


def _text(log: bytes) -> str:
    return log.decode("utf-16" if log.startswith(UTF_16) else "utf-8", errors="replace")


def _show(messages: Messages, console: Console) -> None:
    """Print what the first message of each rank says."""
    from pipeline.report.out_of_memory import sentences

    if messages.num_messages > 1:
        of = "the first" if len(messages.first) == 1 else f"the first of each of {len(messages.first)} ranks or cards"
        console.print(f"The log has {messages.num_messages} out-of-memory messages; {of} is explained.")
    for message in messages.first:
        rank = "" if message.rank is None or len(messages.first) == 1 else f"Rank {message.rank}: "
        say(console, rank + " ".join(sentences(message)))


def _of_command(settings: ExplainSettings, messages: Messages, console: Console) -> "Explanation | None":
    """Simulate the command on the card of the first message, and print and log what was found."""
    from pipeline.report.out_of_memory import SMALL_SEGMENT_BYTES

    message = messages.first[0]
    if message.place is not Place.CARD or message.text.startswith(("HIP", "XPU")):
        console.print(
            "The command is not simulated: Fitproof simulates NVIDIA's cards, and it is not one that is full."
        )
        return None
    if message.available_bytes is not None and message.available_bytes < SMALL_SEGMENT_BYTES:
        console.print(
            "The command is not simulated: others leave it nothing of the card, so no change of it helps; end them, or "
            "take another card."
        )
        return None
    from pipeline.config.command_template import Template, words_of
    from pipeline.jobs.publish import publish
    from pipeline.prediction.commands.explanation import explain as explain_command
    from pipeline.prediction.commands.levers import command_with, levers_of
    from pipeline.simulation.environment import python_of
    from pipeline.tracking.job import open_job

    template = Template(tuple(words_of(str(settings.command))))
    wanted = _wanted(settings, message, shlex.join(command_with(template)), console)
    own = {name: tuple(map(str, values)) for name, values in (settings.levers or {}).items()}
    levers = levers_of(template, own, python_of(wanted.command), wanted.card.capability)
    with open_job("explain", shlex.join(wanted.command)[:100], settings.output) as job:
        job.params({"gpu": wanted.card.name, "command": settings.command, "message": message.text})
        with tempfile.TemporaryDirectory(prefix="fitproof-") as folder:
            found = explain_command(
                wanted,
                template,
                levers,
                message,
                Path(folder),
                partial(say, console),
                may_need_values=settings.values == "auto",
            )
        publish(found, job, console)
        job.tags({"change": "none" if found.answer is None else found.answer.shown})
        job.succeeded = _exit_code(found) != 1
    return found


def _wanted(settings: ExplainSettings, message: OutOfMemoryMessage, command: str, console: Console) -> Simulate:
    """Return the simulation of the command on the card of a message, with what others held there."""
    gpu = settings.gpu or _card_of(message, console)
    shared = settings.model_dump(include={*SimulatedCommandSettings.model_fields} - {"gpu", "command"})
    wanted = wanted_run(validate(SimulatedCommandSettings, {**shared, "gpu": gpu, "command": command}, "explain"))
    if message.total_bytes is None or message.available_bytes is None:
        return wanted
    card = _with_memory(wanted.card, message)
    free_mib = min(message.available_bytes // MIB, card.memory_mib - card.context.mib)
    return replace(wanted, card=card, budget_bytes=free_mib * MIB)


def _card_of(message: OutOfMemoryMessage, console: Console) -> str:
    """Return the name of the card whose memory is the nearest to that of the message."""
    total = message.total_bytes
    if total is None:
        raise InvalidInputError(
            "the message does not say how much memory the card has, so it must be named; add --gpu, as --gpu rtx4090; "
            f"all {len(CARDS)} names are in {TABLE}"
        )
    by_distance = sorted(CARDS, key=lambda name: abs(CARDS[name].memory_mib * MIB - total))
    near = [name for name in by_distance if abs(CARDS[name].memory_mib * MIB / total - 1) <= SAME_CARD]
    if not near:
        raise InvalidInputError(
            f"no card that Fitproof knows has the {total / 2**30:.2f} GiB of the message; add --gpu with one of the "
            "same generation, which is then simulated with that memory; the closest in memory are "
            f"{', '.join(by_distance[:NUM_CLOSE])}, all {len(CARDS)} names are in {TABLE}"
        )
    if len(near) > 1:
        console.print(
            f"{' and '.join(near)} have about the memory of the message; it is simulated on {near[0]}, and --gpu names "
            "the other.",
            highlight=False,
        )
    return near[0]


def _with_memory(card: Card, message: OutOfMemoryMessage) -> Card:
    """Return the card with the memory of the message, and the CUDA context that the message shows."""
    total, beside = message.total_bytes, message.beside_bytes
    assert total is not None and beside is not None  # _wanted() has looked
    context = card.context
    if message.own_bytes is not None and message.reserved_bytes is not None:
        own_mib = max(0, message.own_bytes - message.reserved_bytes) // MIB
        context = Context(own_mib, "what the message shows beside torch's allocator")
    elif beside < context.mib * MIB:
        context = Context(beside // MIB, "what the message shows as neither free nor torch's")
    return replace(card, memory_mib=total // MIB, context=context)


def _content(messages: Messages) -> dict[str, Any]:
    """Return what a log says as an object for JSON."""
    from pydantic import TypeAdapter

    return {"kind": "Messages", **TypeAdapter(Messages).dump_python(messages, mode="json")}


def _exit_code(found: "Explanation | None") -> int:
    if found is None or not found.is_reproduced:
        return 1
    return EXIT_CODE_DOES_NOT_FIT if found.answer is None else 0
