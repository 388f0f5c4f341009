"""Recomputation: the measured change of memory next to the theoretical one, and the number of recomputed layers."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from pipeline.report.changes import INTERVAL, change_in_table, change_text, interval_text
from pipeline.report.page import Section
from pipeline.report.plot import ABOUT, GREY, Panel, Plot, colour, data, layered
from pipeline.report.table import Form, Table
from pipeline.training.metrics import Row
from pipeline.training.time_differences import is_compared, time_change

FORWARDS = "block_forwards_per_step"
FORMS: dict[str, Form] = {"memory %": "{:+.1f}", "theory %": "{:+.1f}", "time %": change_in_table}
MARKERS = ("circle", "square", "triangle-up", "diamond")
UNITS = {"memory %": "% of the peak in live tensors", "time %": "% of the time per step"}


def theory_percent(num_layers: float) -> float:
    """Return the theoretical change of activations in percent, 1/sqrt(L) - 1 for L layers.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The measured change is that of the whole peak,
    parameters and logits included.
    """
    return 100 * (1 / math.sqrt(num_layers) - 1)


def section(rows: Sequence[Row]) -> Section:
    """Return the table and the plot `depth`: changes and block forwards of each variant that checkpoints."""
    lines = _depth(rows)
    if not lines:
        return Section(title="recomputation")
    depths = range(1, max(line["layers"] for line in lines) + 3)
    theory = [{"layers": n, "memory %": theory_percent(n), "about": "1/sqrt(layers) - 1"} for n in depths]
    panels = (
        _points(lines, "change of memory (grey: 1/sqrt(layers) - 1)", "memory %", theory),
        _points(lines, "change of time", "time %"),
    )
    return Section(
        title="recomputation",
        tables=(Table.of("depth", "change of memory and time by policy and depth", lines, forms=FORMS),),
        plots=(Plot(name="depth", title="what recomputation saves and costs", panels=panels),),
    )


def _depth(rows: Sequence[Row]) -> list[dict[str, Any]]:
    baselines = {row.comparison: row for row in rows if row.is_baseline}
    lines = []
    for row in rows:
        baseline, time = baselines.get(row.comparison), time_change(row)
        if baseline is None or time is None or not is_compared(row) or FORWARDS not in row.metrics:
            continue
        num_layers = baseline.metrics[FORWARDS] / baseline.params["accumulation_steps"]
        lines.append(
            {
                "comparison": row.comparison,
                "variant": row.name,
                "layers": int(num_layers),
                "memory %": -row.metrics["memory_saving_percent"],
                "theory %": theory_percent(num_layers),
                "time %": time.percent,
                INTERVAL: interval_text(time),
                "block forwards": int(row.metrics[FORWARDS]),
                "without checkpointing": int(baseline.metrics[FORWARDS]),
                "largest loss difference": row.metrics.get("max_loss_difference"),
            }
        )
    return lines


def _points(variants: Sequence[dict[str, Any]], title: str, y: str, theory: Sequence[dict[str, Any]] = ()) -> Panel:
    """Return a point for each variant at its depth, over a line of `theory`."""
    lines = [
        {name: line[name] for name in ("variant", "layers", "memory %", "time %")} | {"about": _about(line)}
        for line in variants
    ]
    names = list(dict.fromkeys(line["variant"] for line in lines))
    colours = [colour(index) for index in range(len(names))]
    shapes = [MARKERS[index % len(MARKERS)] for index in range(len(names))]
    base = alt.Chart(data(lines)).encode(
        x=alt.X("layers:Q", axis=alt.Axis(tickMinStep=1)),
        y=alt.Y(f"{y}:Q", title=UNITS[y]),
        **ABOUT,
    )
    layers = [
        base.mark_point(filled=True, size=80, opacity=1).encode(
            color=alt.Color("variant:N", scale=alt.Scale(domain=names, range=colours)),
            shape=alt.Shape("variant:N", scale=alt.Scale(domain=names, range=shapes)),
        )
    ]
    if theory:
        layers.insert(0, base.properties(data=data(theory)).mark_line(color=GREY, strokeDash=[2, 2]))
    return Panel(title=title, chart=layered(*layers))


def _about(line: dict[str, Any]) -> str:
    return (
        f"{line['comparison']}: {line['variant']}\n{line['layers']} layers\n"
        f"memory {line['memory %']:+.1f} %, in theory {line['theory %']:+.1f} %\ntime per step "
        f"{change_text(line['time %'], 1)} ({line['time from to']})"
    )
