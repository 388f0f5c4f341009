"""The heat map of a card's plan: the predicted peak of every configuration, at any budget, and what it is made of."""

import math
from collections.abc import Sequence
from itertools import combinations

import altair as alt

from pipeline.base.by_key import grouped
from pipeline.base.units import MIB
from pipeline.config.given import written
from pipeline.memory.timeline import CATEGORIES
from pipeline.planning.plan import CardPlan, PlannedRow, expected_order
from pipeline.report.plot import (
    ABOUT,
    GREY,
    Panel,
    Plot,
    colour,
    data,
    layered,
    names_axis,
    names_height,
    names_width,
    short,
)
from pipeline.searching.trials import front_of, heading, label

WORKSPACES = "workspaces"
"""The purpose of what kernels allocate besides their results."""
AXES = ("micro_batch_size", "checkpointing")
"""The dimensions along the axes of a heat map, if they show enough configurations."""
ENOUGH = 4
"""Configurations that a heat map shows at first, if there are others along which it can."""
NUM_STEPS = 100
"""Steps of a budget from the least to the most, at least."""
SHARES = alt.Scale(domain=[0, 100, 100.001, 200], range=["#D6ECF9", "#56B4E9", "#F6C7A3", "#D55E00"], clamp=True)
"""Colours of shares of the budget: blue fits, red does not; dark text can be read on all of them."""


def seconds_text(seconds: float) -> str:
    """Return the estimated time of a step as text."""
    return f"{short(seconds)} s"


def speed_text(row: PlannedRow) -> str:
    """Return an estimated throughput in as many digits as an estimate has."""
    return f"{float(f'{row.tokens_per_second:.3g}'):,.0f} tokens/s"


def percent_text(row: PlannedRow) -> str:
    """Return the uncertainty of a row's time as text."""
    return f"± {100 * row.deviation:.0f} %"


def fit_plot(name: str, card: CardPlan, num_cells: int) -> Plot:
    """Return a heat map over two dimensions, the others and the budget as controls, and a configuration's memory."""
    rows = _shown(card.rows, num_cells)
    most_bytes = max(row.peak_bytes for row in rows)
    unit, unit_bytes = ("GiB", 2**30) if most_bytes >= 2**33 else ("MiB", MIB)
    start = card.recommended or min(rows, key=lambda row: row.peak_bytes)
    values = {key: list(dict.fromkeys(written(row.choice[key]) for row in rows)) for key in rows[0].choice}
    varied = [key for key in values if len(values[key]) > 1]
    across, down = _axes(rows, start, varied)
    controls = [key for key in varied if key not in (across, down)]
    columns = sorted({_along(row, across) for row in rows}, key=lambda value: (len(value), value))
    lines = list(dict.fromkeys(_along(row, down) for row in rows))
    purposes = [name for name in CATEGORIES if any(round(_bytes_of(row, name) / MIB) for row in rows)]
    cells = [
        {"id": number, "column": _along(row, across), "line": lines.index(_along(row, down))}
        | {
            "mib": round(row.peak_bytes / MIB, 2),
            "text": f"{row.peak_bytes / unit_bytes:,.{1 if unit == 'GiB' else 0}f}",
        }
        | {f"of_{place}": written(row.choice[key]) for place, key in enumerate(controls)}
        | {"speed": round(row.tokens_per_second, 3), "speed_text": speed_text(row)}
        | {"about": _about(row, card), "parts": list(_parts(row, purposes).values())}
        for number, row in enumerate(rows)
    ]
    chosen = [
        alt.param(
            name=f"of_{place}_chosen",
            value=written(start.choice[key]),
            bind=alt.binding_select(options=values[key], name=heading(key)),
        )
        for place, key in enumerate(controls)
    ]
    budget_mib, most_mib = card.budget_bytes / MIB, math.ceil(1.1 * most_bytes / MIB)
    step = 1 if most_mib > NUM_STEPS else 0.1
    more = f" (all fit from {math.ceil(most_bytes / MIB):,})" if budget_mib > most_mib else ""
    bound = alt.param(
        name="budget",
        value=round(budget_mib, 2),  # which may be beyond the end of the range: colours are shares of it
        bind=alt.binding_range(min=0, max=most_mib, step=step, name=f"budget, MiB{more}"),
    )
    marked = alt.param(name="marked", value=[rows.index(start) if start is card.recommended else -1])
    axis = names_axis(lines)
    axis["title"] = heading(down)
    axis["minExtent"] = names_width(lines)  # with other values of the controls other names are shown
    base = (
        alt.Chart()
        .transform_filter(" && ".join(f"datum.of_{n} == of_{n}_chosen" for n in range(len(controls))) or "true")
        .transform_calculate(share="100 * datum.mib / budget")
        .encode(
            x=alt.X("column:O", title=heading(across), sort=columns, axis=alt.Axis(labelAngle=0, grid=False)),
            y=alt.Y("line:O", axis=axis),
            **ABOUT,
        )
    )
    legend = alt.Legend(title="% of the budget", gradientLength=200, values=[0, 50, 100, 150, 200])
    chart = layered(
        base.properties(name="cells")
        .mark_rect(cornerRadius=3)
        .encode(color=alt.Color("share:Q", scale=SHARES, legend=legend)),
        base.properties(name="sizes").mark_text(color="#111111").encode(text="text:N"),
        base.transform_filter("indexof(marked, datum.id) >= 0")
        .properties(name="starts")
        .mark_rect(filled=False, stroke=colour(2), strokeWidth=4, cornerRadius=3),
        data=data(cells, "configurations"),
    ).add_params(bound, marked, *chosen)
    title = (
        f"predicted peak in {unit}, by {heading(across)} and {heading(down)}: blue fits the budget (at first "
        f"{short(card.budget_bytes / unit_bytes)} {unit}), red does not"
    )
    title += "; green frame: start here" if card.recommended else ""
    if num_left := len(card.rows) - len(rows):
        title += f" ({num_left:,} slower configurations are only in the table)"
    given = ", ".join(f"{heading(key)} {written(start.choice[key])}" for key in controls)
    what_if = f"Nothing fits {budget_mib:,.0f} MiB."
    if card.recommended is not None:
        where = f"start with {label(start.choice)}: {start.peak_bytes / MIB:,.1f} MiB, {speed_text(start)}."
        what_if = f"At {budget_mib:,.0f} MiB: {where} Move the budget to see where to start with another one."
    panel = Panel(title=title, chart=chart, height=max(120, names_height(lines, 44)), what_if=what_if)
    panels = (panel, _memory_panel(start, card, rows, purposes))
    return Plot(name=name, title=f"what fits {card.name}", given=given, panels=panels)


def _axes(rows: Sequence[PlannedRow], start: PlannedRow, varied: Sequence[str]) -> tuple[str, str]:
    """Return AXES, or the two dimensions over which the most configurations are like `start`; long names go down.

    Of a space of which only the most promising part was predicted, AXES may show one configuration alone.
    """

    def num_shown(axes: tuple[str, str]) -> int:
        fixed = [key for key in varied if key not in axes]
        return sum(all(row.choice[key] == start.choice[key] for key in fixed) for row in rows)

    best = AXES if num_shown(AXES) >= ENOUGH else max([AXES, *combinations(varied, 2)], key=num_shown)
    across, down = sorted(best, key=lambda key: (key != AXES[0], max(len(_along(row, key)) for row in rows)))
    return across, down


def _along(row: PlannedRow, key: str) -> str:
    return str(row.micro_batch_size) if key == "micro_batch_size" else written(row.choice.get(key, ""))


def _memory_panel(start: PlannedRow, card: CardPlan, rows: Sequence[PlannedRow], purposes: Sequence[str]) -> Panel:
    """Return the memory at the peak of a configuration by purpose, to which page.js adds what is under the pointer."""
    parts = _parts(start, purposes)
    most_mib = max(
        (mib for row in rows if row.fits for mib in _parts(row, purposes).values()), default=max(parts.values())
    )
    shades = alt.Scale(domain=list(parts), range=[*(colour(CATEGORIES.index(name)) for name in purposes), GREY])
    lines = [{"name": name, "mib": mib} for name, mib in parts.items()]
    axis = alt.Axis(tickCount=6)
    base = alt.Chart().encode(
        y=alt.Y("name:N", sort=list(parts), title=None, axis=alt.Axis(ticks=False, domain=False, grid=False)),
        x=alt.X("mib:Q", title="MiB", scale=alt.Scale(domain=[0, 1.15 * most_mib], nice=False), axis=axis),
        tooltip=["name:N", alt.Tooltip("mib:Q", title="MiB", format=",.0f")],
    )
    chart = layered(
        base.mark_bar(clip=True).encode(color=alt.Color("name:N", scale=shades, legend=None)),
        base.properties(name="amounts").mark_text(align="left", dx=3).encode(text=alt.Text("mib:Q", format=",.0f")),
        data=data(lines, "parts"),
    )
    return Panel(
        title=f"memory at the peak: {'where to start' if start is card.recommended else 'the least'}, or what is "
        "under the pointer (or the arrow keys)",
        chart=chart,
        height=34 * len(parts),
        follows=_about(start, card),
    )


def margins_text(row: PlannedRow) -> str:
    """Return the deviation of the estimated time, and between what it lies where ranks send something."""
    if row.seconds_between is None:
        return percent_text(row)
    overlapped, serial = map(seconds_text, row.seconds_between)
    return f"{percent_text(row)}; {overlapped} if all that ranks send overlaps, {serial} if nothing does"


def _parts(row: PlannedRow, purposes: Sequence[str]) -> dict[str, int]:
    """Return the MiB of each purpose at the peak, and of what the caching allocator has reserved besides."""
    parts = {name: _bytes_of(row, name) for name in purposes}
    parts["reserved, not allocated"] = row.peak_bytes - row.peak_allocated_bytes
    return {name: round(num_bytes / MIB) for name, num_bytes in parts.items()}


def _bytes_of(row: PlannedRow, purpose: str) -> int:
    """Return the bytes of a purpose at the peak; workspaces are what is allocated and has no other."""
    if purpose != WORKSPACES:
        return row.category_bytes.get(purpose, 0)
    return row.peak_allocated_bytes - sum(row.category_bytes.values()) if row.category_bytes else 0


def _shown(rows: Sequence[PlannedRow], num_cells: int) -> list[PlannedRow]:
    """Return the rows of the combinations of controls that have the fastest at every budget, then the fastest."""
    front = {id(row) for row in front_of(rows, lambda row: (row.peak_bytes, row.seconds / row.tokens))}
    ordered = sorted(rows, key=lambda row: (id(row) not in front, not row.fits, *expected_order(row)))
    groups = grouped(
        (tuple(str(value) for key, value in row.choice.items() if key not in AXES), row) for row in ordered
    )
    shown: list[PlannedRow] = []
    for group in groups.values():
        if shown and len(shown) + len(group) > num_cells:
            break
        shown += group
    order = {id(row): place for place, row in enumerate(rows)}
    return sorted(shown, key=lambda row: order[id(row)])


def _about(row: PlannedRow, card: CardPlan) -> str:
    left_mib = (card.budget_bytes - row.peak_bytes) / MIB
    lines = [
        label(row.choice),
        f"accumulation {row.accumulation_steps}",
        f"{row.peak_bytes / MIB:,.0f} MiB, {abs(left_mib):,.0f} MiB {'of headroom' if row.fits else 'too many'}",
        f"{seconds_text(row.seconds)} a step, {row.tokens_per_second:,.0f} tokens/s ({margins_text(row)})",
    ]
    return "\n".join(lines)
