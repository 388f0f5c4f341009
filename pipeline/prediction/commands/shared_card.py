"""What processes that share a card need of it together: each is simulated as if it had the card to itself."""

from dataclasses import dataclass

from pipeline.base.units import MIB
from pipeline.simulation.run import SimulatedRun


@dataclass(frozen=True, kw_only=True)
class SharedCard:
    """A card that several processes used at the same time."""

    number: int
    num_processes: int
    num_bytes: int
    """The most that they use of it together, if their peaks coincide."""

    @property
    def note(self) -> str:
        """What is to be said of it."""
        return (
            f"{self.num_processes} processes used card {self.number} at the same time: together at most "
            f"{self.num_bytes / MIB:,.1f} MiB, if their peaks coincide. The least memory for them is not looked for."
        )


def shared_card(run: SimulatedRun) -> SharedCard | None:
    """Return the card of which processes use most together; None if no two of them used one at the same time."""
    peaks = {process.pid: process.peak_device_bytes for process in run.processes}
    found = []
    for one in run.records:
        beside = [record for record in run.records if record.begin_us <= one.begin_us <= record.end_us]
        for number in peaks[one.pid]:
            used = [peaks[record.pid][number] for record in beside if number in peaks[record.pid]]
            found.append(SharedCard(number=number, num_processes=len(used), num_bytes=sum(used)))
    return max((card for card in found if card.num_processes > 1), key=lambda card: card.num_bytes, default=None)
