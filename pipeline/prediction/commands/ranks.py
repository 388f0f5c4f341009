"""Simulates a command as each rank of many: the one that needs the most is the answer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.prediction.commands.simulation import OBJECTS, RankMemory, Simulation, Verdict, simulate
from pipeline.simulation.run import Simulate


def simulate_ranks(
    wanted: Simulate,
    folder: Path,
    say: Callable[[str], None] = print,
    *,
    may_need_values: bool = False,
    finds_smallest: bool = True,
    is_hidden: bool = False,
) -> Simulation:
    """Simulate the command as each rank, and return what the one needs that needs the most, with all in `ranks`.

    The ranks between two that need the same are taken to be equal to them, and are not run; where two differ, the one
    in the middle between them runs, and so on. The first rank's output is shown, unless it `is_hidden`.

    Raises:
        InvalidInputError: the command cannot be started, or uses no card.

    """
    (folder / OBJECTS).mkdir()
    found: dict[int, Simulation] = {}

    def run(rank: int, hides: bool = True, searches: bool = False) -> Simulation:
        say(f"running it as rank {rank} of {wanted.world_size}")
        own = folder / f"rank_{rank}{'_smallest' if searches else ''}"
        return simulate(
            replace(wanted, rank=rank, objects=folder / OBJECTS),
            own,
            say,
            may_need_values=may_need_values,
            finds_smallest=searches,
            is_hidden=hides,
        )

    last = wanted.world_size - 1
    found[0] = run(0, hides=is_hidden)
    for rank in sorted({last // 2, last} - {0}):
        found[rank] = run(rank)
    stack = [(0, last // 2), (last // 2, last)]
    while stack:
        low, high = stack.pop()
        if high - low > 1 and _needs(found[low]) != _needs(found[high]):
            middle = (low + high) // 2
            found[middle] = run(middle)
            stack += [(low, middle), (middle, high)]
    largest = max(sorted(found), key=lambda rank: _order(found[rank]))
    searches = finds_smallest and found[largest].verdict is not Verdict.NONE
    answer = run(largest, searches=True) if searches else found[largest]
    own = folder / f"rank_{largest}{'_smallest' if searches else ''}"
    for snapshot in own.glob("memory_snapshot_*.pickle"):
        snapshot.rename(folder / snapshot.name)
    ran = [max(rank for rank in found if rank <= each) for each in range(wanted.world_size)]
    ranks = (RankMemory(rank=rank, ran_as=one, **_needs(found[one])) for rank, one in enumerate(ran))
    return replace(answer, ranks=tuple(ranks))


def _needs(simulation: Simulation) -> dict[str, Any]:
    """Return what equal ranks have in common."""
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
    return {"verdict": simulation.verdict, **{name: getattr(simulation.largest, name, None) for name in peaks}}


def _order(simulation: Simulation) -> tuple[bool, bool, int]:
    """Return by what ranks are ordered: one without a verdict is the answer, for then there is none of all."""
    num_bytes = 0 if simulation.largest is None else simulation.largest.device_bytes
    return simulation.verdict is Verdict.NONE, simulation.verdict is Verdict.DOES_NOT_FIT, num_bytes
