"""Whether a command needs more memory of a card than it may: limits, and a baseline with a tolerance."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.base.by_key import summed
from pipeline.prediction.commands.memory_baseline import LineMemory, MemoryBaseline, baseline_of
from pipeline.prediction.commands.simulation import Simulation, Verdict


class CheckVerdict(StrEnum):
    """What became of a check."""

    PASSED = "passed"
    TOO_LARGE = "too large"
    NONE = "no verdict"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that a peak may be."""

    peak: str
    """allocated or reserved."""
    allowed_bytes: int
    source: str
    """Who allows it: the limit of 38GiB, or memory.json + 1 %."""
    baseline_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Requirement(Limit):
    """A peak, and the most that it may be."""

    num_bytes: int

    @property
    def is_met(self) -> bool:
        """Whether the peak is no larger than allowed."""
        return self.num_bytes <= self.allowed_bytes


@dataclass(frozen=True, kw_only=True)
class LineChange(LineMemory):
    """The memory of one source line and purpose at the peak; the line is where it was, if it is there no more."""

    baseline_bytes: int

    @property
    def change_bytes(self) -> int:
        """How much more it is than in the baseline."""
        return self.num_bytes - self.baseline_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """What a command needs, and what it may need."""

    simulation: Simulation
    command: str
    """As it was given."""
    requirements: tuple[Requirement, ...] = ()
    baseline_file: str | None = None
    changes: tuple[LineChange, ...] = ()
    """Of source lines against the baseline, the largest first; what is equal is left out."""
    other_conditions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What the memory depends on and was different in the baseline: then and now, by name."""

    @property
    def verdict(self) -> CheckVerdict:
        """Whether it fits the card, and each requirement is met."""
        if self.simulation.verdict is Verdict.NONE:
            return CheckVerdict.NONE
        is_fine = self.simulation.verdict is Verdict.FITS and all(one.is_met for one in self.requirements)
        return CheckVerdict.PASSED if is_fine else CheckVerdict.TOO_LARGE


def limits_of(baseline: MemoryBaseline, file: str, percent: float) -> list[Limit]:
    """Return the limits of a baseline that may be exceeded by so much."""
    return [
        Limit(
            peak=peak,
            allowed_bytes=int(num_bytes * (1 + percent / 100)),
            source=f"{file} + {percent:g} %",
            baseline_bytes=num_bytes,
        )
        for peak, num_bytes in _peaks(baseline).items()
    ]


def check_memory(
    simulation: Simulation, command: str, limits: Iterable[Limit], before: MemoryBaseline | None, file: str | None
) -> MemoryCheck:
    """Return what a simulated command needs beside what it may need, and what changed since the baseline of a file."""
    if simulation.largest is None:
        return MemoryCheck(simulation=simulation, command=command)
    found = baseline_of(simulation, command)
    peaks = _peaks(found)
    return MemoryCheck(
        simulation=simulation,
        command=command,
        requirements=tuple(Requirement(**vars(limit), num_bytes=peaks[limit.peak]) for limit in limits),
        baseline_file=file,
        changes=() if before is None else line_changes(before.lines, found.lines),
        other_conditions={} if before is None else _other_conditions(before.conditions, found.conditions),
    )


def _peaks(found: MemoryBaseline) -> dict[str, int]:
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def _other_conditions(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {
        name: (before.get(name, "none"), now.get(name, "none"))
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    }


def line_changes(before: Sequence[LineMemory], now: Sequence[LineMemory]) -> tuple[LineChange, ...]:
    """Return the lines whose memory differs, the largest change first; a line that has only moved has none."""
    old, new = _by_place(before), _by_place(now)
    written = {_place(one): one.line for one in (*before, *now)}
    found = (
        LineChange(
            line=written[place],
            code=place[1],
            purpose=place[2],
            num_bytes=new[place],
            baseline_bytes=old[place],
        )
        for place in written
        if new[place] != old[place]
    )
    return tuple(sorted(found, key=lambda one: (-abs(one.change_bytes), one.line, one.purpose)))


Place = tuple[str, str, str]
"""File, text of the line and purpose; file and line where the text is not known."""


def _place(one: LineMemory) -> Place:
    return (one.line.rpartition(":")[0] if one.code else one.line, one.code, one.purpose)


def _by_place(lines: Iterable[LineMemory]) -> Counter[Place]:
    return summed((_place(one), one.num_bytes) for one in lines)
