"""Whether a command needs more memory of a card than it may: limits, and a baseline with a tolerance."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    num_bytes: int
    text: str
    """As it was given, such as 38GiB."""


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """A baseline, and how much more than that is allowed."""

    baseline: MemoryBaseline
    file: str
    percent: float | None
    """None: any memory, since the baseline is about to be replaced."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A peak, and the most that it may be."""

    peak: str
    num_bytes: int
    allowed_bytes: int
    source: str
    """Who allows it: the limit of 38GiB, or memory.json + 1 %."""
    baseline_bytes: int | None = None

    @property
    def is_met(self) -> bool:
        """Whether the peak is no larger than allowed."""
        return self.num_bytes <= self.allowed_bytes


@dataclass(frozen=True, kw_only=True)
class LineChange:
    """The memory of one source line and purpose at the peak, now and in the baseline."""

    line: str
    """As file:line; where it was, if it is there no more."""
    code: str
    purpose: str
    num_bytes: int
    baseline_bytes: int

    @property
    def change_bytes(self) -> int:
        """How much more it is."""
        return self.num_bytes - self.baseline_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryCheck:
    """What a command needs, and what it may need."""

    simulation: Simulation
    command: str
    """As it was given."""
    requirements: tuple[Requirement, ...]
    baseline_file: str | None
    changes: tuple[LineChange, ...]
    """Of source lines against the baseline, the largest first; what is equal is left out."""
    other_conditions: Mapping[str, tuple[str, str]]
    """What the memory depends on and was different in the baseline: then and now, by name."""

    @property
    def verdict(self) -> CheckVerdict:
        """Whether it fits the card, and each requirement is met."""
        if self.simulation.verdict is Verdict.NONE:
            return CheckVerdict.NONE
        is_fine = self.simulation.verdict is Verdict.FITS and all(one.is_met for one in self.requirements)
        return CheckVerdict.PASSED if is_fine else CheckVerdict.TOO_LARGE


def check_memory(simulation: Simulation, command: str, limits: Iterable[Limit], allowed: Allowed | None) -> MemoryCheck:
    """Return what a simulated command needs beside what it may need."""
    if simulation.largest is None:
        return MemoryCheck(
            simulation=simulation,
            command=command,
            requirements=(),
            baseline_file=None,
            changes=(),
            other_conditions={},
        )
    found = baseline_of(simulation, command)
    before = None if allowed is None else allowed.baseline
    return MemoryCheck(
        simulation=simulation,
        command=command,
        requirements=(*_of_limits(found, limits), *_of_baseline(found, allowed)),
        baseline_file=None if allowed is None else allowed.file,
        changes=() if before is None else line_changes(before.lines, found.lines),
        other_conditions={} if before is None else _other_conditions(before.conditions, found.conditions),
    )


def _of_limits(found: MemoryBaseline, limits: Iterable[Limit]) -> Iterator[Requirement]:
    peaks = _peaks(found)
    for limit in limits:
        yield Requirement(
            peak=limit.peak,
            num_bytes=peaks[limit.peak],
            allowed_bytes=limit.num_bytes,
            source=f"the limit of {limit.text}",
        )


def _of_baseline(found: MemoryBaseline, allowed: Allowed | None) -> Iterator[Requirement]:
    if allowed is None or allowed.percent is None:
        return
    now = _peaks(found)
    for peak, num_bytes in _peaks(allowed.baseline).items():
        yield Requirement(
            peak=peak,
            num_bytes=now[peak],
            allowed_bytes=int(num_bytes * (1 + allowed.percent / 100)),
            source=f"{allowed.file} + {allowed.percent:g} %",
            baseline_bytes=num_bytes,
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
