"""Simulates a command: whether it fits a card, what fills the memory at its peak, and the least that it needs."""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import last_lines
from pipeline.base.units import MIB
from pipeline.memory.breakdown import Breakdown, ModuleMemory, StepMemory, at_peak, course_of, modules_at_peak
from pipeline.memory.work import Work
from pipeline.prediction.commands.failed_allocation import OutOfMemory, held_then, line_of, out_of_memory
from pipeline.prediction.commands.smallest_memory import (
    SmallestMemory,
    card_of,
    device_bytes,
    run_in,
    smallest_memory,
)
from pipeline.prediction.commands.snapshot import history_of
from pipeline.simulation.cards import UNLIMITED_MIB, cards_with, find_card
from pipeline.simulation.communicators import communicators_bytes, note_on_communicators
from pipeline.simulation.process.watch import FEWEST_STEPS, PATIENCE
from pipeline.simulation.record import Record
from pipeline.simulation.report import UnknownRead, has_steering_read
from pipeline.simulation.run import Simulate, SimulatedRun, note_on_kernels, with_room

NUM_PLACES = 3
"""Places or functions that a note names."""
LARGEST_COUNTS = 1024
"""Bytes of the largest array that is taken for one of lengths or counts."""
OBJECTS = "objects"
"""Name of the folder of what ranks send each other, which all runs of a command share."""
WORK_HOOK = Path(__file__).with_name("work_hook.py")
"""The hook of a command whose work is counted too, in one optimizer step more."""
OF_GROUPS = (
    "It has groups of ranks beside that of all: of trainings with context parallelism torchtitan published 2.4 to "
    "4.8 % more memory than was simulated, for reasons that are not known; of others within 0.3 %."
)
"""The rows of benchmarks/published/torchtitan_torch_2_6.csv."""
NEEDS_KNOWN_WORKSPACES = "It fits with the workspaces that cuDNN mostly takes, not with the largest that it may take."
LATE_OPTIMIZER = (
    f"One of its optimizers took fewer than {FEWEST_STEPS} steps while another one took {PATIENCE} times as many as "
    "--steps says, and was not waited for any longer: what it needs is not known. Simulate it with --steps all."
)
OWN_UPDATES = (
    "No optimizer of torch.optim took a step. A step is counted where gradients changed between two backward passes, "
    f"and {PATIENCE} times as many as --steps says end the command."
)


class Verdict(StrEnum):
    """Whether a command fits a card."""

    FITS = "fits"
    DOES_NOT_FIT = "does not fit"
    NONE = "no verdict"


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """The memory of one process on its card."""

    rank: int
    num_steps: int
    ended_by: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_bytes: int
    """The most that it used of the card's memory: reserved bytes, its context, and what libraries take themselves."""
    peak: Breakdown
    """What lives at the peak; its modules are source lines, its operators functions of libraries."""
    user_line: str | None
    """The line of the user's own code that leads to the peak; None if there is none."""
    lines: tuple[ModuleMemory, ...]
    """The memory at the peak by source line and purpose."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The text of each of these lines."""
    course: StepMemory
    """From the first allocation to the end."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one rank of many; None where its process left no record."""

    rank: int
    ran_as: int
    """The rank that ran: itself, or an equal one below it."""
    verdict: Verdict
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a command needs of a card."""

    command: tuple[str, ...]
    called: str | None = None
    """What Python called, which has no command: a function, or the steps of a model."""
    card: str
    gpu: str
    """What `--gpu` takes for the card."""
    capability: tuple[int, int]
    num_cards: int
    world_size: int = 1
    """Number of ranks of which the command was one, and all others imagined."""
    rank: int = 0
    ranks: tuple[RankMemory, ...] = ()
    """All ranks, if all were asked for; `rank` is then the one that needs the most."""
    memory_bytes: int
    """Of each card: what the command may use, the context included."""
    with_values: bool
    """Whether small tensors were computed on the host too."""
    verdict: Verdict
    why_no_verdict: str | None = None
    """Why there is none."""
    exit_code: int
    out_of_memory: OutOfMemory | None
    """What ended the command on this card; None if the card's memory did not."""
    processes: tuple[ProcessMemory, ...]
    """The one with the largest peak first; on a larger card where the given one is too small."""
    bytes_with_workspaces: int | None
    """What that one uses of the card if cuDNN takes the largest workspaces that it may; None if cuDNN takes none, or if
    the command does not fit. Else `device_bytes` is without: the truth lies between the two."""
    shared_bytes: int | None = None
    """The most that processes at the same time use of one card together; None if each has cards of its own."""
    nccl_bytes: tuple[int, int] | None = None
    """What NCCL would take of the card besides, of one rank of many: the smallest and the largest that was measured."""
    smallest_bytes: int | None
    """The smallest memory of a card on which the command ran; None if it is not known."""
    smallest_expandable_bytes: int | None
    """The same with the allocator's expandable segments, as torch's allocator served the same requests."""
    passes_work: Work | None = None
    """Work of all passes of an optimizer step of the process that computes most; None if it is not known."""
    update_work: Work | None = None
    """Work of its update likewise."""
    assumptions: Mapping[str, str]
    """On what the answer rests, such as versions."""
    notes: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `simulate` that were given, but for the card and the command."""

    @property
    def largest(self) -> ProcessMemory | None:
        """The process with the largest peak; None if no process used a card."""
        return self.processes[0] if self.processes else None

    @property
    def may_overcommit_card(self) -> bool:
        """Whether processes at the same time may use more of one card together than it has."""
        return (self.shared_bytes or 0) > self.memory_bytes

    @property
    def cards_that_fit(self) -> tuple[str, ...]:
        """Names of the cards of the same compute capability that have the memory, the smallest first.

        Other cards choose other kernels, which need other memory.
        """
        if self.smallest_bytes is None:
            return ()
        return tuple(cards_with(self.capability, self.smallest_bytes - find_card(self.gpu).context.mib * MIB))


def what_runs(wanted: Simulate) -> str:
    """Return what simulate() does first, as a line for a terminal."""
    steps = "to its end" if wanted.num_steps is None else f"for {wanted.num_steps} optimizer steps"
    return f"running the command on a simulated {wanted.card.name}, {steps}"


def simulate(
    wanted: Simulate,
    folder: Path,
    say: Callable[[str], None] = print,
    *,
    may_need_values: bool = False,
    finds_smallest: bool = True,
    is_hidden: bool = False,
) -> Simulation:
    """Run the command on the simulated card and return what it needs; `say` receives what is being done.

    The command's output is shown or, if it `is_hidden`, written into log files in `folder`.

    Once it reads from the card what is not known and may steer it, and `may_need_values`, it is ended and begins again
    with the values of small tensors, which are computed on the host: generation, for one, would never end without. So
    does a command that failed after it had read anything that is not known, such as an optimizer's counter of steps.

    Where it fits and uses cuDNN, it runs once more with the largest workspaces that cuDNN may take: they are an upper
    limit, and there is no verdict if it runs out of memory with them. Where it does not fit, it runs once more on a
    card that has room, to tell what it would need. The smallest memory is that of smallest_memory().
    Where processes share a card, there is no verdict if it has not what they use together, and no smallest memory.
    The memory snapshots of the run that the answer is of are left in `folder` as memory_snapshot_NUMBER.pickle.
    With WORK_HOOK it says too what an optimizer step computes.

    Raises:
        InvalidInputError: the command cannot be started, or uses no card.

    """
    if wanted.objects is None:
        (folder / OBJECTS).mkdir(parents=True)
        wanted = replace(wanted, objects=folder / OBJECTS)
    run_it = partial(_with_values_if_needed, say=say, may_need_values=may_need_values)
    wanted, run = run_it(wanted, folder / "first", is_hidden=is_hidden)
    _check_uses_card(wanted, run)
    (verdict, reason), failed, notes, roomy = _verdict(wanted, run), out_of_memory(run), _notes(wanted, run), run
    bytes_with_workspaces = None
    if verdict is Verdict.FITS and _uses_cudnn(run):
        say("running it again with the largest workspaces that cuDNN may take")
        largest = run_in(replace(wanted, hook=None, has_largest_workspaces=True), folder / "with_workspaces")
        if out_of_memory(largest) is not None:
            verdict, notes = Verdict.NONE, (NEEDS_KNOWN_WORKSPACES, *notes)
            reason = "it depends on workspaces that only cuDNN knows (see below)"
        elif largest.is_complete:
            most, without = (max(device_bytes(one, record) for record in one.records) for one in (largest, run))
            bytes_with_workspaces = most if most > without else None
    if verdict is Verdict.DOES_NOT_FIT:
        say(f"it does not fit; running it on a card with {UNLIMITED_MIB // 1024} GiB, to see what it needs")
        ran, roomy = run_it(with_room(wanted), folder / "with_room")
        wanted = replace(wanted, values=ran.values)
        notes = (*_notes(wanted, roomy if roomy.records else run), *_note_on_failure(roomy))
        failed = None if failed is None else replace(failed, held=held_then(run, roomy))
    shared_bytes, shared_note = _shared_card(roomy)
    if shared_note is not None:
        notes = (shared_note, *notes)
        if verdict is Verdict.FITS and shared_bytes > _memory_bytes(wanted):
            verdict, reason = Verdict.NONE, "its processes may need more of a card together than it has (see below)"
    smallest, has_verdict = SmallestMemory(), verdict is not Verdict.NONE
    if roomy.records and roomy.is_complete and has_verdict and shared_note is None and finds_smallest:
        say("looking for the smallest memory")
        smallest = smallest_memory(replace(wanted, hook=None), roomy, folder / "smallest")
    for number, record in enumerate(roomy.records):
        shutil.copy(record.snapshot, folder / f"memory_snapshot_{number}.pickle")
    processes = (_memory(roomy, record) for record in roomy.records if record.has_allocated)
    passes_work, update_work = _work(roomy.folder)
    return Simulation(
        command=wanted.command,
        card=wanted.card.name,
        gpu=wanted.card.gpu,
        capability=wanted.card.capability,
        num_cards=wanted.num_cards,
        world_size=wanted.world_size,
        rank=wanted.rank,
        memory_bytes=_memory_bytes(wanted),
        with_values=wanted.values,
        verdict=verdict,
        why_no_verdict=reason,
        exit_code=run.exit_code,
        out_of_memory=failed,
        processes=tuple(sorted(processes, key=lambda one: -one.device_bytes)),
        bytes_with_workspaces=bytes_with_workspaces,
        shared_bytes=shared_bytes or None,
        nccl_bytes=communicators_bytes(count) if (count := _num_communicators(run)) else None,
        smallest_bytes=smallest.num_bytes,
        smallest_expandable_bytes=smallest.num_bytes_expandable,
        passes_work=passes_work,
        update_work=update_work,
        assumptions=_assumptions(roomy if roomy.records else run),
        notes=(*notes, *([] if smallest.note is None else [smallest.note])),
    )


def _with_values_if_needed(
    wanted: Simulate,
    folder: Path,
    say: Callable[[str], None],
    *,
    may_need_values: bool,
    is_hidden: bool = True,
) -> tuple[Simulate, SimulatedRun]:
    """Run a command, and once more with the values of small tensors if it needs them; return which of them ran."""
    may_begin_again = may_need_values and not wanted.values
    found = run_in(wanted, folder, is_hidden=is_hidden, ends_at_steering_read=may_begin_again)
    if not may_begin_again or not (has_steering_read(folder) or _may_have_failed_by_reading(found)):
        return wanted, found
    say("it reads numbers from the card that nothing has computed; running it again with those of small tensors")
    wanted = replace(wanted, values=True)
    return wanted, run_in(wanted, folder.with_name(f"{folder.name}_with_values"), is_hidden=is_hidden)


def _check_uses_card(wanted: Simulate, run: SimulatedRun) -> None:
    """Raise InvalidInputError if a command ended well, or at its time limit, and left no record of a card."""
    if run.records:
        return
    used = [process.pid for process in run.processes if process.peak_device_bytes]
    command = " ".join(wanted.command)
    if run.was_late and not used:
        raise InvalidInputError(
            f"the command must use a GPU within its time limit, which is {wanted.time_limit_seconds:g} seconds, and "
            f"{command} was ended before it did; set a longer time_limit"
        )
    if run.exit_code != 0:
        return
    if not all((run.folder / f"{pid}.json").exists() for pid in used):
        raise InvalidInputError(
            f"the command must record its memory, and {command} used a GPU and left no record: a signal ended it, or "
            "its Python ignores the environment; let it end by itself, without -I and -E"
        )
    raise InvalidInputError(
        f"the command must train on a GPU with torch, and {command} ended without using one; set its device to cuda, "
        "or name the script that trains"
    )


def _shared_card(run: SimulatedRun) -> tuple[int, str | None]:
    """Return the most that processes at the same time use of one card together, and what is to be said of it.

    Each is simulated as if it had the card to itself. It is 0 if no two of them used one at the same time.
    """
    peaks = {process.pid: process.peak_device_bytes for process in run.processes}
    most_bytes, note = 0, None
    for one in run.records:
        beside = [record for record in run.records if record.begin_us <= one.begin_us <= record.end_us]
        for number in peaks[one.pid]:
            used = [peaks[record.pid][number] for record in beside if number in peaks[record.pid]]
            if len(used) > 1 and sum(used) > most_bytes:
                most_bytes = sum(used)
                note = (
                    f"{len(used)} processes used card {number} at the same time: together at most "
                    f"{most_bytes / MIB:,.1f} MiB, if their peaks coincide. The least memory for them is not looked "
                    "for."
                )
    return most_bytes, note


def _work(folder: Path) -> tuple[Work | None, Work | None]:
    """Return the work of the passes and of the update of the process that computes most; None if it is not known."""
    counted = TypeAdapter(dict[str, Work])
    works = [counted.validate_json(file.read_bytes()) for file in folder.glob("*.work")]
    most = max(works, key=lambda work: work["passes"].flops, default={})
    return most.get("passes"), most.get("update")


def _uses_cudnn(run: SimulatedRun) -> bool:
    return any("cudnn" in name.lower() for process in run.processes for name in process.assumed_bytes)


def _may_have_failed_by_reading(run: SimulatedRun) -> bool:
    has_failed = run.exit_code != 0 and out_of_memory(run) is None
    return has_failed and bool(_unknown_reads(run))


def _num_communicators(run: SimulatedRun) -> int:
    return max((record.num_communicators for record in run.records), default=0)


def _unknown_reads(run: SimulatedRun) -> list[UnknownRead]:
    return [read for process in run.processes for read in process.unknown_reads]


def _verdict(wanted: Simulate, run: SimulatedRun) -> tuple[Verdict, str | None]:
    """Return whether the command fits or, if that is not known, why."""
    has_unmodelled = any(process.unmodelled for process in run.processes)
    if out_of_memory(run) is not None and not has_unmodelled:
        return Verdict.DOES_NOT_FIT, None
    if run.shortfall is not None:
        has_note = any(record.has_late_optimizer for record in run.records)
        return Verdict.NONE, f"{run.shortfall} (see below)" if has_note else run.shortfall
    if run.exit_code != 0:
        num_steps = max((len(record.steps) for record in run.records), default=0)
        ended = f"the command ended with exit code {run.exit_code} after {num_steps} optimizer steps"
        has_none = note_on_kernels(wanted) is not None
        return Verdict.NONE, f"{ended}, as torch has no kernels for this card (see above)" if has_none else ended
    if has_unmodelled:
        return Verdict.NONE, "it called functions that the simulated card does not model (see below)"
    return Verdict.FITS, None


def _memory(run: SimulatedRun, record: Record) -> ProcessMemory:
    """Return the memory of a process on the card that it used most."""
    number = card_of(record)
    device, history = record.devices[number], history_of(record, number)
    lines = modules_at_peak(history.timeline)
    return ProcessMemory(
        rank=record.rank,
        num_steps=len(record.steps),
        ended_by=record.ended_by,
        peak_allocated_bytes=device.peak_allocated_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        device_bytes=device_bytes(run, record),
        peak=at_peak(history.timeline),
        user_line=history.user_line_of_peak,
        lines=lines,
        code={one.module: history.code.get(one.module, "") for one in lines},
        course=course_of(history.timeline),
    )


def _memory_bytes(wanted: Simulate) -> int:
    """Return the memory of a card that the command may use, the context included."""
    if wanted.budget_bytes is None:
        return wanted.card.memory_mib * MIB
    return wanted.budget_bytes + wanted.card.context.mib * MIB


def _assumptions(run: SimulatedRun) -> dict[str, str]:
    """Return what the answer rests on."""
    if not run.records:
        return {}
    first = run.records[0]
    versions = {name: version for name, version in first.versions.items() if version is not None}
    attention = sorted({name for process in run.processes for name in process.attention})
    return {
        **versions,
        "allocator": first.allocator or "torch's defaults",
        **({"attention": ", ".join(attention)} if attention else {}),
    }


def _some(names: Sequence[str]) -> str:
    more = len(names) - NUM_PLACES
    return ", ".join(names[:NUM_PLACES]) + (f" and {more} more" if more > 0 else "")


def _note_on_failure(run: SimulatedRun) -> tuple[str, ...]:
    """Return how the run on a card with room ended, if that failed too or was ended too early."""
    if run.shortfall is not None:
        return (f"On a card with room {run.shortfall}: what it needs is not known.",)
    if run.exit_code == 0:
        return ()
    *_, last = "no output", *last_lines(run.folder.with_suffix(".log"))
    return (f"On a card with room it ended with exit code {run.exit_code}: {last}",)


def _may_count(read: UnknownRead) -> bool:
    """Whether a read may be of a few integers of 8 bytes, such as lengths."""
    return not read.may_steer and 8 < read.bytes <= LARGEST_COUNTS and read.bytes % 8 == 0


def _notes(wanted: Simulate, run: SimulatedRun) -> tuple[str, ...]:
    """Return what limits the answer."""
    found = [note for note in (note_on_kernels(wanted), wanted.card.note) if note]
    unmodelled = sorted({name for process in run.processes for name in process.unmodelled})
    if unmodelled:
        found.append(
            f"The simulated card does not model {', '.join(unmodelled)}, which the command called: its "
            "answers were zero, so what follows from them is unknown."
        )
    reads = sorted({read.place for read in _unknown_reads(run) if read.may_steer})
    if reads:
        found.append(
            "It read sizes, integers or truth values from the card that are not known, and went on with zero, so what "
            f"follows may differ: {_some(reads)}."
        )
    arrays = sorted({read.place for read in _unknown_reads(run) if _may_count(read)})
    if arrays and not wanted.values:
        found.append(
            f"It read arrays from the card that are not known, and went on with zeros: {_some(arrays)}. If they are "
            "lengths or counts, what follows differs: simulate it with --values on."
        )
    if wanted.world_size > 1:
        found.append(
            f"It ran as rank {wanted.rank} of {wanted.world_size}, and the other ranks were imagined: the tensors "
            "that it received of them are unknown, or, of broadcasts and all-gathers, taken to be its own."
        )
        if num_communicators := _num_communicators(run):
            those = "one communicator" if num_communicators == 1 else f"{num_communicators} communicators"
            found.append(note_on_communicators(those, num_communicators))
        if num_communicators > 1:
            found.append(OF_GROUPS)
    assumed = sorted({name for process in run.processes for name in process.assumed_bytes})
    if assumed:
        found.append(f"Sizes of workspaces that only NVIDIA's libraries know are assumed: {_some(assumed)}.")
    refused = sorted({what for process in run.processes for what in process.refused})
    if refused and run.exit_code != 0:
        found.append(f"It {' and '.join(refused)}: a real card refuses that as well.")
    if run.records and out_of_memory(run) is None and not any(record.steps for record in run.records):
        phases = Counter(phase.phase for record in run.records for phase in record.phases)
        seen = ", ".join(f"{phase} {count} times" for phase, count in phases.items()) or "no backward pass"
        found.append(f"No optimizer of torch.optim took a step ({seen}): the answer is of what ran.")
    elif any(len(record.steps) < FEWEST_STEPS for record in run.records if record.steps):
        found.append("Only one optimizer step was taken: a first forward pass has no optimizer state beside it yet.")
    if any(record.updates_itself for record in run.records):
        found.append(OWN_UPDATES)
    if any(record.has_late_optimizer for record in run.records):
        found.append(LATE_OPTIMIZER)
    caught = [record for record in run.records if record.out_of_memory]
    if caught and out_of_memory(run) is None:
        line = line_of(caught[0], caught[0].out_of_memory[0])
        found.append(f"The script ran out of memory at {line}, and went on after that.")
    if not all(record.is_whole for record in run.records):
        found.append(
            "It allocated so often that only the latest allocations are known: lines and purposes are of these."
        )
    if wanted.card.context.is_assumed:
        found.append(
            f"The CUDA context of {wanted.card.name} was not measured: {wanted.card.context.mib} MiB are assumed."
        )
    return tuple(found)
