"""The report of a check of memory: what is too large, what grew by source line; as text, Markdown, JSON and JUnit."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

from pipeline.base.units import MIB, mib
from pipeline.prediction.commands.memory_check import CheckVerdict, LineChange, MemoryCheck, Requirement
from pipeline.prediction.commands.simulation import ProcessMemory, Verdict
from pipeline.report.page import Report, Section
from pipeline.report.simulation import NUM_LINES, largest_table
from pipeline.report.simulation import answer as answer_of_simulation
from pipeline.report.table import Table

NUM_LARGEST = 5
"""Largest allocations that are shown."""
SMALLEST_SHARE = 0.01
"""Of the largest change that a change must have to be shown."""
CODE_CHARACTERS = 60
"""Of a source line that are shown in a table."""
NOT_OF_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def check_report(check: MemoryCheck) -> Report:
    """Return the report for the terminal and a pull request."""
    largest = check.simulation.largest
    tables = [_peaks_table(check.requirements)] if check.requirements else []
    if check.changes:
        tables.append(_changes_table(check))
    if largest is not None and check.verdict is not CheckVerdict.PASSED:
        table = largest_table(largest)
        frame = table.frame.head(NUM_LARGEST)
        frame = frame.assign(**{"made by": "`" + frame["made by"] + "`"})  # Markdown would take <module> for a tag
        tables.append(replace(table, frame=frame, num_in_terminal=None))
    return Report(
        entry="check",
        question=f"Does `{check.command}` need more memory of {check.simulation.card} than it may?",
        answer=answer(check),
        sections=(Section(title="memory", tables=tuple(tables), notes=check.simulation.notes),),
        environment=check.simulation.assumptions,
        settings={"card": check.simulation.card, "command": check.command},
    )


def answer(check: MemoryCheck) -> str:
    """Return the answer in sentences."""
    sentences = [_verdict(check)]
    if check.verdict is CheckVerdict.TOO_LARGE:
        sentences += [_too_large(one) for one in check.requirements if not one.is_met]
        sentences += [_largest_change(one) for one in check.changes[:1]]
    sentences += [
        f"{check.baseline_file} had {name} {before}, and this has {now}."
        for name, (before, now) in check.other_conditions.items()
    ]
    sentences += _shrunk(check)
    return " ".join((*sentences, answer_of_simulation(check.simulation)))


def _verdict(check: MemoryCheck) -> str:
    if check.verdict is CheckVerdict.NONE:
        return "Not checked."
    if check.verdict is CheckVerdict.TOO_LARGE:
        return "Too large:" if check.simulation.verdict is Verdict.FITS else "Too large for the card."
    sources = ", ".join(dict.fromkeys(one.source for one in check.requirements))
    return f"Passed: no larger than {sources}." if sources else "Passed: it fits the card."


def _too_large(one: Requirement) -> str:
    excess = one.num_bytes - one.allowed_bytes
    peak = f"{one.num_bytes / MIB:,.1f} MiB {one.peak}"
    if one.baseline_bytes is None:
        return f"{peak}, {_mib(excess)} MiB more than {one.source}."
    grown = one.num_bytes - one.baseline_bytes
    return (
        f"{peak}, {_mib(grown)} MiB ({100 * grown / one.baseline_bytes:.2f} %) more than the "
        f"{one.baseline_bytes / MIB:,.1f} of the baseline; {one.source} allows {one.allowed_bytes / MIB:,.1f}."
    )


def _largest_change(change: LineChange) -> str:
    code = f" (`{change.code}`)" if change.code else ""
    return (
        f"The largest change at the peak is of {change.purpose} at {change.line}{code}: "
        f"{change.change_bytes / MIB:+,.1f} MiB."
    )


def _shrunk(check: MemoryCheck) -> list[str]:
    """Return a sentence if a peak is smaller than the baseline's by more than it may be larger."""
    smaller = [
        one
        for one in check.requirements
        if one.baseline_bytes is not None and one.num_bytes < 2 * one.baseline_bytes - one.allowed_bytes
    ]
    if not smaller or check.verdict is not CheckVerdict.PASSED:
        return []
    less = ", ".join(
        f"{_mib(one.baseline_bytes - one.num_bytes)} MiB {one.peak}" for one in smaller if one.baseline_bytes
    )
    return [f"It needs less than the baseline ({less}): --update keeps it so."]


def _mib(num_bytes: int) -> str:
    """Return a size of more than zero bytes in MiB, with the decimals that a small one needs."""
    return f"{num_bytes / MIB:,.1f}" if num_bytes >= MIB // 10 else f"{num_bytes / MIB:,.6f}"


def _peaks_table(requirements: Iterable[Requirement]) -> Table:
    lines = [
        {
            "peak": one.peak,
            "MiB": one.num_bytes / MIB,
            "allowed MiB": one.allowed_bytes / MIB,
            "baseline MiB": mib(one.baseline_bytes),
            "allowed by": one.source,
            "verdict": "passed" if one.is_met else "too large",
        }
        for one in requirements
    ]
    return Table.of("peaks", "peaks", lines, forms=dict.fromkeys(("MiB", "allowed MiB", "baseline MiB"), "{:,.1f}"))


def _changes_table(check: MemoryCheck) -> Table:
    least = SMALLEST_SHARE * abs(check.changes[0].change_bytes)
    shown = [one for one in check.changes[:NUM_LINES] if abs(one.change_bytes) >= least]
    lines = [
        {
            "change MiB": one.change_bytes / MIB,
            "MiB": one.num_bytes / MIB,
            "baseline MiB": one.baseline_bytes / MIB,
            "purpose": one.purpose,
            "line": one.line,
            "code": f"`{one.code[:CODE_CHARACTERS]}`" if one.code else "",
        }
        for one in shown
    ]
    rest = check.changes[len(shown) :]
    others = sum(one.change_bytes for one in rest) / MIB
    return Table.of(
        "changes",
        f"what changed at the peak since {check.baseline_file}, by source line",
        lines,
        forms={"change MiB": "{:+,.1f}", "MiB": "{:,.1f}", "baseline MiB": "{:,.1f}"},
        note=f"{len(rest)} more lines changed, by {others:+,.1f} MiB together." if rest else None,
    )


def to_json(check: MemoryCheck) -> str:
    """Return the check as one JSON object."""
    largest = check.simulation.largest
    content = {
        "verdict": check.verdict.value,
        "answer": answer(check),
        "card": check.simulation.card,
        "command": check.command,
        "requirements": [{**asdict(one), "is_met": one.is_met} for one in check.requirements],
        "changes": [{**asdict(one), "change_bytes": one.change_bytes} for one in check.changes],
        "peak": None if largest is None else _peak(largest),
        "assumptions": dict(check.simulation.assumptions),
        "notes": list(check.simulation.notes),
    }
    return json.dumps(content, indent=1)


def _peak(largest: ProcessMemory) -> dict[str, Any]:
    return {
        "allocated_bytes": largest.peak_allocated_bytes,
        "reserved_bytes": largest.peak_reserved_bytes,
        "device_bytes": largest.device_bytes,
        "phase": largest.peak.phase,
        "line": largest.peak.module,
        "user_line": largest.user_line,
        "largest": [
            {"bytes": one.num_bytes, "purpose": one.category, "line": one.module, "made_by": one.operator}
            for one in largest.peak.largest
        ],
    }


def to_junit(check: MemoryCheck) -> str:
    """Return the check as JUnit's XML: a test case for the card, and one for each requirement."""
    card = check.simulation.card
    suite = ElementTree.Element("testsuite", name="fitproof check")
    fits = ElementTree.SubElement(
        suite, "testcase", classname="fitproof.check", name=_xml(f"fits {card}: {check.command}")
    )
    if check.verdict is CheckVerdict.NONE:
        ElementTree.SubElement(fits, "error", message=_xml("not checked")).text = _xml(answer(check))
    elif check.simulation.verdict is not Verdict.FITS:
        ElementTree.SubElement(fits, "failure", message=_xml(f"does not fit {card}")).text = _xml(answer(check))
    for one in check.requirements if check.verdict is not CheckVerdict.NONE else ():
        name = f"{one.peak} memory on {card}, {one.source}: {check.command}"
        case = ElementTree.SubElement(suite, "testcase", classname="fitproof.check", name=_xml(name))
        if not one.is_met:
            ElementTree.SubElement(case, "failure", message=_xml(_too_large(one))).text = _xml(answer(check))
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(attribute, str(len([*suite.iter(tag)])))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    return NOT_OF_XML.sub("?", text)
