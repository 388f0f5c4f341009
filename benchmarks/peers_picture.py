"""The plot of benchmarks/peers.py: speed and peak memory of each peer over the bare loop's."""

from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from peer_run import BARE, PEERS
from peers_figures import Name, Row, by_peer, peak_mib, speed

from pipeline.report.plot import Plot, colour

OTHERS = [peer for peer in PEERS if peer != BARE]


def plot(rows: Sequence[Row], names: Sequence[Name], device_name: str) -> bytes:
    """Return a PNG of two panels; `names` are the models and configurations that it shows."""
    runs = {name: by_peer(rows, name) for name in names}
    compared = {name: of_peers for name, of_peers in runs.items() if BARE in of_peers}

    def speeds(axes: Axes) -> None:
        for place, name, peer, shade, _ in _points(compared):
            ratio = speed(compared[name][peer], compared[name][BARE])
            if ratio is not None:
                spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
                axes.errorbar(ratio.median, place, xerr=spread, fmt="o", color=shade, capsize=3, markersize=5)
        _finish(axes, "speed (right is faster)", "over the bare loop's, with the 95 % interval")

    def peaks(axes: Axes) -> None:
        for place, name, peer, shade, label in _points(compared):
            ratio = peak_mib(compared[name][peer]) / peak_mib(compared[name][BARE])
            axes.plot(ratio, place, "o", color=shade, markersize=5, label=label)
        _finish(axes, "peak memory (left is less)", "over the bare loop's")
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, 0.95), max(high, 1.05))  # noise must not fill the panel
        axes.legend(fontsize="small", loc="best")

    return Plot(name="peers", title=f"The same training, {device_name}", panels=(speeds, peaks)).to_png()


def _points(
    compared: Mapping[Name, Mapping[str, Sequence[Row]]],
) -> Iterator[tuple[float, Name, str, str, str | None]]:
    """Yield (height, model and configuration, peer, colour, label of the first such point) for each point."""
    for index, (name, of_peers) in enumerate(compared.items()):
        offset = (index - (len(compared) - 1) / 2) * 0.7 / len(compared)
        for number, peer in enumerate(peer for peer in OTHERS if peer in of_peers):
            yield OTHERS.index(peer) + offset, name, peer, colour(index), None if number else " ".join(name)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(OTHERS)), OTHERS)
    axes.set_ylim(len(OTHERS) - 0.5, -0.5)
    axes.set(title=title, xlabel=unit)
    axes.grid(axis="x", alpha=0.3)
