"""The report of an explained message: its memory, where the command fails, and the smallest change that fits."""

import shlex
from collections.abc import Iterable
from dataclasses import replace

from pipeline.base.units import MIB, mib
from pipeline.prediction.commands.explanation import Explanation, Try
from pipeline.prediction.commands.failed_allocation import FailedTensor, OutOfMemory
from pipeline.prediction.commands.simulation import Verdict
from pipeline.report.out_of_memory import sentences, size
from pipeline.report.page import Headline, Report, Section
from pipeline.report.simulation import answer as simulation_answer
from pipeline.report.simulation import simulation_report
from pipeline.report.table import Table

SAME_SHARE = 0.02
"""Two requests for memory that differ by no more are called the same."""


def explanation_report(explanation: Explanation) -> Report:
    """Return the report; the memory of the simulation follows the table of what was tried."""
    simulated = simulation_report(explanation.simulation)
    tries, line = explanation.tries, shlex.join(explanation.answer_command)
    tried = (Section(title="what was tried", tables=(_tries_table(tries),)),) if tries else ()
    return replace(
        simulated,
        entry="explain",
        question=f"Why does `{shlex.join(explanation.simulation.command)}` run out of memory, and what fits?",
        answer=answer(explanation),
        headlines=_headlines(explanation),
        commands=() if explanation.answer is None else (("Run it with the smallest change that fits", line),),
        settings={**simulated.settings, "message": " ".join(sentences(explanation.message))},
        sections=(*tried, *(section.on_page_alone() for section in simulated.sections)),
    )


def answer(explanation: Explanation) -> str:
    """Return the answer in sentences."""
    simulation = explanation.simulation
    whole = f"{simulation.card} with {simulation.memory_bytes / MIB:,.0f} MiB for this process"
    if simulation.verdict is Verdict.NONE:
        seen = "" if simulation.out_of_memory else f"The command was not seen to run out of memory on {whole}. "
        return f"{seen}{simulation_answer(simulation)}"
    if not explanation.is_reproduced:
        largest = simulation.largest
        used = "" if largest is None else f": it uses {largest.device_bytes / MIB:,.1f} MiB"
        return (
            f"The command does not run out of memory in the simulation of {whole}{used} "
            f"({simulation.verdict.value}). What differs where it did may be the data (longer sequences come later: "
            "--steps all), the versions of the packages, or what other processes held at that moment."
        )
    failed = simulation.out_of_memory
    assert failed is not None  # that is what the verdict means
    begin = f"On {whole}, {_failure(explanation, failed)}"
    return " ".join([begin, *_held(failed), *_without_others(explanation), *_smallest_change(explanation)])


def _failure(explanation: Explanation, failed: OutOfMemory) -> str:
    asked = explanation.message.asked_bytes
    tensor = "" if failed.tensor is None else f" for {_tensor(failed.tensor)}"
    compared = ""
    if asked is not None:
        is_same = abs(failed.wanted_bytes - asked) <= SAME_SHARE * asked
        compared = (
            ", as in the message"
            if is_same
            else f"; the message asked for {size(asked)}, so data or versions differ somewhat"
        )
    return (
        f"{failed.line} asks for {failed.wanted_bytes / MIB:,.1f} MiB{tensor} where "
        f"{failed.free_bytes / MIB:,.1f} are free{compared}."
    )


def _tensor(tensor: FailedTensor) -> str:
    """Return the tensor in words: shape and type, its operator, the variable that it is made for, the module."""
    made = [
        tensor.operator,
        *([] if tensor.node is None else [f"in the backward pass, {tensor.node}"]),
        *([] if tensor.variable is None else [f"on the way to `{tensor.variable}`"]),
        *([] if tensor.module is None else [f"in {tensor.module}"]),
    ]
    if tensor.shape is None:
        needed = "what" if tensor.rounded_bytes is None else f"{size(tensor.rounded_bytes)} that"
        return f"{needed} an operator needs while it runs ({', '.join(made)})"
    return f"a tensor of {' x '.join(map(str, tensor.shape)) or 'one number'} {tensor.dtype} ({', '.join(made)})"


def _held(failed: OutOfMemory) -> list[str]:
    if failed.held is None:
        return []
    parts = [f"{name} {num_bytes / MIB:,.0f}" for name, num_bytes in failed.held.category_bytes.items()]
    largest = failed.held.largest[0]
    return [
        f"{failed.held.peak_bytes / MIB:,.0f} MiB are in tensors then: {', '.join(parts)}; the largest is of "
        f"{largest.category}, {largest.num_bytes / MIB:,.0f} MiB, at {largest.module}."
    ]


def _without_others(explanation: Explanation) -> list[str]:
    """Return the sentence on the whole card, where the command runs as it is if others leave it."""
    needed, others = explanation.tries[0].needed_bytes, explanation.message.others_bytes
    if needed is None or others is None or needed > explanation.simulation.memory_bytes + others:
        return []
    return [
        f"Without what other processes hold it would run as it is: it needs {needed / MIB:,.0f} MiB, and they hold "
        f"{others / MIB:,.0f}."
    ]


def _smallest_change(explanation: Explanation) -> list[str]:
    found = explanation.answer
    memory = explanation.simulation.memory_bytes
    if found is not None and found.needed_bytes is not None:
        prices = "; ".join(f"{change.lever}: {change.price}" for change in found.changes)
        return [
            f"The smallest change that fits is {found.shown}: it needs {found.needed_bytes / MIB:,.0f} of "
            f"{memory / MIB:,.0f} MiB, and ran there. Its price in time: {prices}."
        ]
    known = [one for one in explanation.tries if one.changes and one.needed_bytes is not None]
    if not known:
        return [
            "No lever of the command is known. Mark the values that it may have, such as --batch {batch:8,4,2}, or "
            "name its options: --levers '{\"batch\": [4, 2]}'."
        ]
    least = min(known, key=lambda one: one.needed_bytes or 0)
    assert least.needed_bytes is not None
    return [
        f"Nothing that was tried fits: the least is {least.needed_bytes / MIB:,.0f} of {memory / MIB:,.0f} MiB, with "
        f"{least.shown}."
    ]


def _tries_table(tries: Iterable[Try]) -> Table:
    lines = [
        {
            "change": one.shown or "none: as it is",
            "needs MiB": mib(one.needed_bytes),
            "fits": "yes" if one.fits else one.failure or "no",
            "price in time": "; ".join(dict.fromkeys(change.price for change in one.changes)),
        }
        for one in tries
    ]
    title = "what was tried: each lever alone, then together"
    return Table.of("tries", title, lines, forms={"needs MiB": "{:,.0f}"})


def _headlines(explanation: Explanation) -> tuple[Headline, ...]:
    simulation, found = explanation.simulation, explanation.answer
    whole = f"of {simulation.memory_bytes / MIB:,.0f} MiB"
    needed = explanation.tries[0].needed_bytes if explanation.tries else None
    headlines = []
    if needed is not None:
        headlines.append(Headline(title="needs", value=f"{needed / MIB:,.0f} MiB", detail=whole))
    if found is not None and found.needed_bytes is not None:
        detail = f"needs {found.needed_bytes / MIB:,.0f} MiB {whole}"
        headlines.append(Headline(title="the smallest change that fits", value=found.shown, detail=detail))
    return tuple(headlines)
