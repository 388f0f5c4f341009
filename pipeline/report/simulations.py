"""The report of several simulations side by side: how their memory differs, and at which source lines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.base.by_key import summed
from pipeline.base.units import MIB, mib
from pipeline.prediction.commands.simulation import ProcessMemory, Simulation
from pipeline.report.page import Report, Section
from pipeline.report.simulation import IN_MIB, NUM_LINES, in_mib
from pipeline.report.table import Table

FEWEST_BYTES = MIB // 2
"""A smaller difference of a line's memory is left out of the answer."""


@dataclass(frozen=True, kw_only=True)
class SimulationComparison:
    """Simulations by their commands and the ids of their runs, the first of which the others are compared with."""

    simulations: Mapping[str, Simulation]


def simulations_report(findings: SimulationComparison) -> Report:
    """Return the report, with a sentence for each simulation but the first."""
    (name, first), *others = _largest(findings).items()
    answers = [_difference(name, first, other_name, other) for other_name, other in others]
    return Report(
        entry="compare",
        question=f"How does the memory of these {len(findings.simulations)} simulations differ?",
        answer=" ".join(answers),
        sections=(Section(title="differences", tables=(_peaks_table(findings), _lines_table(findings))),),
        environment={},
        settings={"runs": ", ".join(findings.simulations)},
    )


def _largest(findings: SimulationComparison) -> dict[str, ProcessMemory]:
    """Return each simulation's process with the largest peak; `compare` refuses a simulation without one."""
    return {name: one.largest for name, one in findings.simulations.items() if one.largest is not None}


def _difference(name: str, first: ProcessMemory, other_name: str, other: ProcessMemory) -> str:
    change = other.peak_allocated_bytes - first.peak_allocated_bytes
    peaks = f"{other.peak_allocated_bytes / MIB:,.1f} MiB allocated"
    if abs(change) < FEWEST_BYTES:
        return f"{other_name} peaks at {peaks}, as {name} does."
    sign = "more" if change > 0 else "less"
    before, after = _by_line(first), _by_line(other)
    changes = {place: after[place] - before[place] for place in {*before, *after}}
    place, purpose = max(changes, key=lambda one: abs(changes[one]))
    largest = changes[place, purpose]
    return (
        f"{other_name} peaks at {peaks}, {abs(change) / MIB:,.1f} MiB {sign} than {name}; the largest difference is of "
        f"{purpose} at {place}: {largest / MIB:+,.1f} MiB."
    )


def _by_line(process: ProcessMemory) -> Counter[tuple[str, str]]:
    return summed(((line.module, line.category), line.num_bytes) for line in process.lines)


def _peaks_table(findings: SimulationComparison) -> Table:
    lines = [
        {
            "simulation": name,
            "card": one.card,
            "verdict": one.verdict.value,
            **in_mib(largest),
            "least MiB": mib(one.smallest_bytes),
            "peak": f"{largest.peak.phase} at {largest.peak.module}",
            "with values": one.with_values,
            **one.assumptions,
        }
        for (name, one), largest in zip(findings.simulations.items(), _largest(findings).values(), strict=True)
    ]
    forms = {**IN_MIB, "least MiB": "{:,.1f}"}
    return Table.of("simulations", "simulations", lines, forms=forms)


def _lines_table(findings: SimulationComparison) -> Table:
    """Return the memory at each peak by source line and purpose, what differs most from the first first."""
    by_name = {name: _by_line(process) for name, process in _largest(findings).items()}
    first = next(iter(by_name.values()))
    places = {place for found in by_name.values() for place in found}

    def largest_change(place: tuple[str, str]) -> int:
        return max(abs(found[place] - first[place]) for found in by_name.values())

    lines = [
        {"line": line, "purpose": purpose, **{name: found[line, purpose] / MIB for name, found in by_name.items()}}
        for line, purpose in sorted(places, key=lambda place: (-largest_change(place), place))
    ]
    return Table.of(
        "lines",
        "MiB at the peak by source line and purpose, the largest difference first",
        lines,
        forms=dict.fromkeys(by_name, "{:,.1f}"),
        num_in_terminal=NUM_LINES,
    )
