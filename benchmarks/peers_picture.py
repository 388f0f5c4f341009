"""The plot of benchmarks/peers.py: speed and peak memory of each peer over the bare loop's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt
from peer_run import BARE, PEERS
from peers_figures import Name, Row, by_peer, peak_mib, speed

from pipeline.report.plot import Panel, Plot, colour, data, layered

OTHERS = [peer for peer in PEERS if peer != BARE]


def plot(rows: Sequence[Row], names: Sequence[Name], device_name: str) -> bytes:
    """Return a PNG of two panels; `names` are the models and configurations that it shows."""
    runs = {name: by_peer(rows, name) for name in names}
    compared = {name: of_peers for name, of_peers in runs.items() if BARE in of_peers}
    speeds, peaks = [], []
    for name, peer, point in _points(compared):
        ratio = speed(compared[name][peer], compared[name][BARE])
        if ratio is not None:
            speeds.append({**point, "value": ratio.median, "low": ratio.low, "high": ratio.high})
        size = peak_mib(compared[name][peer]) / peak_mib(compared[name][BARE])
        peaks.append({**point, "value": size, "low": size, "high": size})
    shown = [" ".join(name) for name in compared]
    panels = (
        _panel("speed (right is faster)", "over the bare loop's, with the 95 % interval", speeds, shown),
        _panel("peak memory (left is less)", "over the bare loop's", peaks, shown),
    )
    return Plot(name="peers", title=f"The same training, {device_name}", panels=panels).to_png()


def _points(compared: Mapping[Name, Mapping[str, Sequence[Row]]]) -> Iterator[tuple[Name, str, dict[str, Any]]]:
    """Yield (model and configuration, peer, its place) for each point; those of a peer stand below each other."""
    for index, (name, of_peers) in enumerate(compared.items()):
        offset = (index - (len(compared) - 1) / 2) * 0.7 / len(compared)
        for peer in (peer for peer in OTHERS if peer in of_peers):
            yield name, peer, {"place": OTHERS.index(peer) + offset, "name": " ".join(name)}


def _panel(title: str, unit: str, points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Panel:
    """Return the points with their intervals; the axis has 0.95 to 1.05, so that noise stays small."""
    low = min([0.95, *(point["low"] for point in points)])
    high = max([1.05, *(point["high"] for point in points)])
    shades = alt.Scale(domain=list(names), range=[colour(index) for index in range(len(names))])
    y_axis = alt.Axis(values=list(range(len(OTHERS))), labelExpr=f"{OTHERS}[datum.value]", title=None, grid=False)
    base = alt.Chart().encode(
        y=alt.Y("place:Q", axis=y_axis, scale=alt.Scale(domain=[len(OTHERS) - 0.5, -0.5], nice=False)),
        color=alt.Color("name:N", scale=shades),
    )
    x = alt.X("value:Q", title=unit, scale=alt.Scale(domain=[low, high], zero=False, padding=8))
    chart = layered(
        alt.Chart(data([{"value": 1}])).mark_rule(strokeWidth=1).encode(x="value:Q"),
        base.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q", title=unit), x2="high:Q"),
        base.mark_point(filled=True, size=50, opacity=1).encode(x=x),
        data=data(points),
    )
    return Panel(title=title, chart=chart, height=40 * len(OTHERS))
