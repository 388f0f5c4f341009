"""The report of a simulated command: whether it fits, what fills the memory at its peak, and what it would need."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.base.units import MIB, mib
from pipeline.memory.allocator_options import EXPANDABLE_SEGMENTS
from pipeline.planning.rates import note_on_rates, step_time_on
from pipeline.planning.step_time import StepTime
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.commands.simulation import (
    ProcessMemory,
    RankMemory,
    Simulation,
    Verdict,
)
from pipeline.report.breakdown import categories_of, shares_table
from pipeline.report.command import command_line
from pipeline.report.course import course_plot
from pipeline.report.page import Advice, Headline, Report, Section
from pipeline.report.plot import Plot
from pipeline.report.table import Table
from pipeline.report.treemap import treemap_plot
from pipeline.simulation.run import NO_KERNELS

NUM_CARDS = 5
"""Cards with enough memory that the answer names, the smallest ones."""
IN_MIB = dict.fromkeys(("allocated MiB", "reserved MiB", "card MiB"), "{:,.1f}")
"""How columns of memory are shown."""
NUM_LINES = 10
"""Source lines that the terminal shows."""
LARGE_PERCENT = 20.0
"""Share of the peak from which it is worth reducing a part of it."""
REMEDIES: Mapping[str, tuple[str, ...]] = {
    "Gradient checkpointing keeps fewer activations for the backward pass, and computes them again; a smaller "
    "micro-batch with as many more accumulation steps keeps fewer too.": ("activations",),
    "A loss in chunks of tokens, or one fused with the head, keeps fewer logits; a smaller micro-batch with as many "
    "more accumulation steps does too.": ("logits and loss",),
    "Parameters, gradients and optimizer state are the same for any micro-batch: an 8-bit optimizer, LoRA, or sharding "
    "over several GPUs reduces them.": ("parameters", "gradients", "optimizer state"),
}
"""What reduces a part of a peak, with the purposes of that part."""


def simulation_report(simulation: Simulation) -> Report:
    """Return the report; it has the process with the largest peak in full, and all others in a table."""
    largest = simulation.largest
    plots, tables = _of_process(largest) if largest is not None else ((), ())
    processes = (_processes_table(simulation),) if len(simulation.processes) > 1 else ()
    card = f"{simulation.num_cards} x {simulation.card}" if simulation.num_cards > 1 else simulation.card
    rank = f" as rank {simulation.rank} of {simulation.world_size}" if simulation.world_size > 1 else ""
    rank = f" as each of {simulation.world_size} ranks" if simulation.ranks else rank
    ranks = (_ranks_table(simulation),) if simulation.ranks else ()
    command = _command(simulation, {"gpu": simulation.gpu, **simulation.given})
    others = {name: value for name, value in simulation.given.items() if name not in ("budget", "other_processes")}
    larger = (
        _command(simulation, {"gpu": simulation.cards_that_fit[0], **others}) if simulation.cards_that_fit else None
    )
    advice = _suggestions(simulation, command, larger)
    return Report(
        entry="simulate",
        question=f"Does {_what(simulation)}{rank} fit {card}?",
        answer=answer(simulation),
        headlines=_headlines(simulation),
        commands=() if command is None else (("Simulate it again", command),),
        is_repeated=True,
        sections=(
            *([Section(title="what to try", suggestions=advice)] if advice else []),
            Section(title="memory", plots=plots, notes=simulation.notes),
            Section(title="tables", tables=(*ranks, *tables, *processes)),
        ),
        environment=simulation.assumptions,
        settings={
            "card": simulation.card,
            "cards": simulation.num_cards,
            "command": simulation.called or shlex.join(simulation.command),
            "values of small tensors": simulation.with_values,
        },
    )


def _what(simulation: Simulation) -> str:
    """Return what was simulated: what Python called, or the command, its program without a path."""
    if simulation.called is not None:
        return simulation.called
    program, *words = simulation.command
    return f"`{shlex.join([Path(program).name, *words])}`"


def answer(simulation: Simulation) -> str:
    """Return the answer in sentences."""
    largest = simulation.largest
    if largest is None and simulation.verdict is Verdict.DOES_NOT_FIT:
        return f"{_failure(simulation)} What it needs is not known: on a card with room it left no record."
    if largest is None:
        return f"No verdict: the command ended with exit code {simulation.exit_code} and left no record of its memory."
    whole = simulation.memory_bytes / MIB
    needed = (
        f"It peaks at {largest.peak_allocated_bytes / MIB:,.1f} MiB allocated and "
        f"{largest.peak_reserved_bytes / MIB:,.1f} MiB reserved, "
        f"{largest.device_bytes / MIB:,.1f} MiB of the card with its context: {_where(largest)}"
    )
    sentences = []
    if simulation.verdict is Verdict.FITS:
        left = whole - max(largest.device_bytes, simulation.shared_bytes or 0) / MIB
        sentences += [f"Fits {simulation.card}, with {left:,.1f} of {whole:,.0f} MiB left.", needed]
        sentences += _with_workspaces(simulation, largest)
    elif simulation.verdict is Verdict.DOES_NOT_FIT:
        sentences += [_failure(simulation), f"On a card with room: {needed[0].lower()}{needed[1:]}"]
    else:
        of = "The largest of them" if simulation.may_overcommit_card else "Until then"
        sentences += [
            f"No verdict: {simulation.why_no_verdict or 'see below'}.",
            f"{of}: {needed[0].lower()}{needed[1:]}",
        ]
    sentences += _of_ranks(simulation)
    if simulation.smallest_bytes is not None:
        names = _some(simulation.cards_that_fit) or "none that Fitproof knows"
        sentences.append(
            f"The least memory on which it runs is {simulation.smallest_bytes / MIB:,.0f} MiB; cards of the same "
            f"compute capability that have so much: {names}."
        )
    if (less := _saved_by_expandable(simulation)) and simulation.smallest_expandable_bytes:
        enough = f"{simulation.smallest_expandable_bytes / MIB:,.0f} MiB are enough"
        sentences.append(f"With {EXPANDABLE_SEGMENTS} {enough}, {less}.")
    sentences += _of_time(simulation)
    sentences.append(_under(simulation))
    return " ".join(sentences)


def _some(names: Sequence[str]) -> str:
    more = len(names) - NUM_CARDS
    return ", ".join(names[:NUM_CARDS]) + (f" and {more} larger ones" if more > 0 else "")


def _under(simulation: Simulation) -> str:
    """Return the sentence on what the answer rests on."""
    known = simulation.assumptions
    attention = f"{known['attention']} attention, " if "attention" in known else ""
    values = ", with values of small tensors" if simulation.with_values else ""
    has_kernels = not any(NO_KERNELS in note for note in simulation.notes)
    fails = "" if has_kernels else ", which has no kernels for this card and fails there"
    return f"This is of torch {known['torch']}{fails}, {attention}allocator: {known['allocator']}{values}."


def _where(largest: ProcessMemory) -> str:
    peak = largest.peak
    through = f", called by {largest.user_line}" if largest.user_line not in (None, peak.module) else ""
    made = "" if peak.operator == peak.phase else f" ({peak.operator})"
    share, part = max((size, name) for name, size in peak.category_bytes.items())
    most = "" if (line := _largest_line(largest)) is None else f", and {line}"
    return f"{peak.phase} at {peak.module}{made}{through}; {100 * share / peak.peak_bytes:.0f} % of it {part}{most}."


def _largest_line(largest: ProcessMemory) -> str | None:
    """Return the share of the peak that one line of the user's code made, if that is another than reaches it."""
    line, num_bytes = max(largest.peak.module_bytes.items(), key=lambda pair: pair[1])
    if line in (largest.peak.module, largest.user_line):
        return None
    return f"{100 * num_bytes / largest.peak.peak_bytes:.0f} % made at {line}"


def _failure(simulation: Simulation) -> str:
    failed = simulation.out_of_memory
    assert failed is not None  # that is what this verdict means
    return (
        f"Does not fit {simulation.card}: {failed.line} asks for {failed.wanted_bytes / MIB:,.1f} MiB, and "
        f"{failed.free_bytes / MIB:,.1f} of {simulation.memory_bytes / MIB:,.0f} MiB are free."
    )


def _with_workspaces(simulation: Simulation, largest: ProcessMemory) -> list[str]:
    """Return the sentence on the upper limit, if cuDNN's workspaces make one."""
    upper = simulation.bytes_with_workspaces
    if upper is None or upper <= largest.device_bytes:
        return []
    return [
        "Only cuDNN knows its workspaces, which are counted as an H200 mostly has them: with the largest that it may "
        f"take, {upper / MIB:,.1f} MiB of the card."
    ]


def _of_ranks(simulation: Simulation) -> list[str]:
    """Return the sentences on which rank it is, and which ones did not run, if all were asked for."""
    if not simulation.ranks:
        return []
    nums_bytes = {one.device_bytes for one in simulation.ranks}
    which = f"All {simulation.world_size} ranks need the same."
    if len(nums_bytes) > 1:
        which = f"Of {simulation.world_size} ranks this is rank {simulation.rank}, which needs the most."
    ran = sorted({one.ran_as for one in simulation.ranks})
    if len(ran) == simulation.world_size:
        return [which]
    shown = ", ".join(map(str, ran))
    return [f"{which} Ranks {shown} ran; those between two that need the same are taken to be equal to them."]


def _saved_by_expandable(simulation: Simulation) -> str:
    """Return how much less memory is enough with the allocator's expandable segments; empty if no less is."""
    plain, expandable = simulation.smallest_bytes, simulation.smallest_expandable_bytes
    if plain is None or expandable is None or expandable >= plain:
        return ""
    return f"{(plain - expandable) / MIB:,.0f} MiB less"


def _suggestions(simulation: Simulation, command: str | None, on_larger: str | None) -> tuple[Advice, ...]:
    """Return what to try, the largest part of the peak first, with the commands that do here and `on_larger` cards."""
    if simulation.largest is None:
        return ()
    peak = simulation.largest.peak
    sizes = {text: sum(peak.category_bytes.get(name, 0) for name in names) for text, names in REMEDIES.items()}
    found = [
        Advice(text=text, evidence=f"{size / MIB:,.0f} MiB, {100 * size / peak.peak_bytes:.0f} % of the peak")
        for text, size in sorted(sizes.items(), key=lambda pair: -pair[1])
        if 100 * size >= LARGE_PERCENT * peak.peak_bytes
    ]
    if less := _saved_by_expandable(simulation):
        text = "Segments of the allocator that can grow leave less memory unused."
        found.append(Advice(text=text, evidence=less, command=command and f"{EXPANDABLE_SEGMENTS} {command}"))
    if simulation.verdict is Verdict.DOES_NOT_FIT and simulation.smallest_bytes and simulation.cards_that_fit:
        text = f"{simulation.cards_that_fit[0]} has enough memory for the command as it is."
        evidence = f"it runs on {simulation.smallest_bytes / MIB:,.0f} MiB"
        found.append(Advice(text=text, evidence=evidence, command=on_larger))
    return tuple(found)


def _step_time(simulation: Simulation) -> StepTime | None:
    return step_time_on(find_hardware(simulation.gpu), simulation.passes_work, simulation.update_work)


def _of_time(simulation: Simulation) -> list[str]:
    """Return the sentences on the time of an optimizer step, if its work is known."""
    time = _step_time(simulation)
    if time is None:
        return []
    beginning = "With room an" if simulation.verdict is Verdict.DOES_NOT_FIT else "An"
    least, most = time.overlapped_seconds, time.serial_seconds
    between = (
        f", {least:.3g} s if all that ranks send overlaps and {most:.3g} s if nothing does" if most > least else ""
    )
    return [
        f"{beginning} optimizer step takes about {time.seconds:.3g} s (± {100 * time.deviation:.0f} %){between}.",
        *filter(None, [note_on_rates(find_hardware(simulation.gpu))]),
    ]


def _headlines(simulation: Simulation) -> tuple[Headline, ...]:
    largest = simulation.largest
    if largest is None:
        return ()
    whole = f"of {simulation.memory_bytes / MIB:,.0f} MiB"
    found = [
        Headline(title=simulation.card, value=simulation.verdict.value, detail=f"{largest.num_steps} steps simulated"),
        Headline(title="memory of the card", value=f"{largest.device_bytes / MIB:,.0f} MiB", detail=whole),
        Headline(
            title="peak allocated",
            value=f"{largest.peak_allocated_bytes / MIB:,.1f} MiB",
            detail="; ".join(filter(None, (f"{largest.peak.phase} at {largest.peak.module}", _largest_line(largest)))),
        ),
    ]
    if (time := _step_time(simulation)) is not None:
        detail = f"± {100 * time.deviation:.0f} %, estimated"
        found.append(Headline(title="an optimizer step", value=f"{time.seconds:.3g} s", detail=detail))
    if simulation.smallest_bytes is not None:
        names = simulation.cards_that_fit
        alike = "cards of the same compute capability"
        detail = f"{alike} that have it: {_some(names)}" if names else f"more than {alike} have"
        value = f"{simulation.smallest_bytes / MIB:,.0f} MiB"
        found.append(Headline(title="least memory", value=value, detail=detail))
    return tuple(found)


def _command(simulation: Simulation, settings: Mapping[str, Any]) -> str | None:
    """Return the command that simulates it with these settings; None if Python called it."""
    if simulation.called is not None:
        return None
    return command_line("simulate", {**settings, "command": shlex.join(simulation.command)})


def _of_process(largest: ProcessMemory) -> tuple[tuple[Plot, ...], tuple[Table, ...]]:
    rest = {
        "rounded up by the allocator": largest.peak_allocated_bytes - largest.peak.peak_bytes,
        "fragmentation: reserved, not allocated": largest.peak_reserved_bytes - largest.peak_allocated_bytes,
        "context, and what libraries take": largest.device_bytes - largest.peak_reserved_bytes,
    }
    lines = shares_table("line", "memory at the peak, by source line", largest.peak.module_bytes)
    title = "memory from the first allocation to the end, by purpose"
    plots = (
        course_plot(largest.course, title, "allocations and releases", is_timed=False),
        treemap_plot(largest.lines, "memory at the peak, by source line and purpose"),
    )
    return plots, (
        shares_table("purpose", "memory of the card at the peak, by purpose", {**categories_of(largest.peak), **rest}),
        replace(lines, num_in_terminal=NUM_LINES),
        largest_table(largest),
    )


def largest_table(largest: ProcessMemory) -> Table:
    """Return the table of the largest allocations that are alive at the peak."""
    lines = [
        {"MiB": one.num_bytes / MIB, "purpose": one.category, "line": one.module, "made by": one.operator}
        for one in largest.peak.largest
    ]
    title = "the largest allocations alive at the peak"
    return Table.of("tensors", title, lines, forms={"MiB": "{:,.1f}"}, num_in_terminal=0)


def in_mib(one: ProcessMemory | RankMemory) -> dict[str, float | None]:
    """Return the peaks of a process by the headings of their columns."""
    return dict(
        zip(IN_MIB, map(mib, (one.peak_allocated_bytes, one.peak_reserved_bytes, one.device_bytes)), strict=True)
    )


def _ranks_table(simulation: Simulation) -> Table:
    lines = [
        {
            "rank": one.rank,
            "verdict": one.verdict.value,
            **in_mib(one),
            "found by": "its own run" if one.ran_as == one.rank else f"rank {one.ran_as}, taken to be equal",
        }
        for one in simulation.ranks
    ]
    return Table.of("ranks", "every rank", lines, forms=IN_MIB)


def _processes_table(simulation: Simulation) -> Table:
    lines = [
        {"rank": one.rank, "steps": one.num_steps, **in_mib(one)}
        for one in sorted(simulation.processes, key=lambda one: one.rank)
    ]
    return Table.of("processes", "processes", lines, forms=IN_MIB)
