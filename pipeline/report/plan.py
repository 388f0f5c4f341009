"""The report of a plan: the predicted memory of every configuration on each card, and the one to start with."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd

from pipeline.base.units import MIB
from pipeline.prediction.plan import CardPlan, PlanFindings, PlannedRow, expected_order
from pipeline.report.breakdown import categories_panel, tensors_table
from pipeline.report.page import Headline, Report, Section
from pipeline.report.plot import ABOUT, Panel, Plot, colour, data, layered, names_axis
from pipeline.report.table import Table
from pipeline.searching.results import columns, heading, label

NUM_IN_TERMINAL = 8
"""Configurations of a card that the terminal shows."""
NUM_ON_PAGE = 300
"""Configurations of all cards' tables on the page; the CSV files have all."""
NUM_CELLS = 1800
"""Configurations of all heat maps of a page, so that it stays small: those of the fastest combinations."""
AXES = ("micro_batch_size", "checkpointing")
"""The dimensions along the axes of a heat map; the others are its controls."""
SHARES = alt.Scale(domain=[0, 100, 100.001, 200], range=["#D6ECF9", "#56B4E9", "#F6C7A3", "#D55E00"], clamp=True)
"""Colours of shares of the budget: blue fits, red does not; dark text can be read on all of them."""
ESTIMATED = (
    "Times are estimated from what a step computes, moves and launches and from the device's data sheet; a search "
    "measures them."
)


def plan_report(findings: PlanFindings) -> Report:
    """Return the report; the terminal shows the details of a card if it is the only one."""
    several = len(findings.cards) > 1
    recommended = any(card.recommended for card in findings.cards)
    num_cells = NUM_CELLS // max(1, len(findings.cards))
    sections = [_card_section(card, findings, 0 if several else None, num_cells) for card in findings.cards]
    if several:
        sections.insert(0, Section(title="cards", tables=(_cards_table(findings.cards),)))
    return Report(
        entry=findings.entry,
        question=(
            f"What would {findings.model} need at an effective batch of {findings.effective_batch_size} on "
            f"{', '.join(card.card for card in findings.cards)}?"
        ),
        answer=" ".join([*map(_answer, findings.cards), *([ESTIMATED] if recommended else [])]),
        sections=tuple(sections),
        environment=findings.environment,
        settings=findings.settings,
    )


def _answer(card: CardPlan) -> str:
    best, budget = card.recommended, card.budget_bytes / MIB
    if not card.rows:
        return f"{card.card} can run none of the configurations: {'; '.join(card.skipped)}."
    if best is None:
        smallest = min((row.peak_bytes for row in card.rows), default=0) / MIB
        return (
            f"Nothing is predicted to fit {budget:,.0f} MiB of {card.card}: the smallest configuration needs "
            f"{smallest:,.0f} MiB."
        )
    fitting = sum(row.fits for row in card.rows)
    return (
        f"On {card.card} {fitting} of {len(card.rows)} configurations are predicted to fit {budget:,.0f} MiB; "
        f"start with {label(best.choice)}, accumulation_steps {best.accumulation_steps}: predicted peak "
        f"{best.peak_bytes / MIB:,.0f} MiB, {budget - best.peak_bytes / MIB:,.0f} MiB of headroom, estimated "
        f"{_seconds(best.seconds)} a step, {best.tokens_per_second:,.0f} tokens a second ({_percent(best)})."
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _percent(row: PlannedRow) -> str:
    """Return the uncertainty of a row's time."""
    return f"± {100 * row.deviation:.0f} %"


def _card_section(card: CardPlan, findings: PlanFindings, num_details: int | None, num_cells: int) -> Section:
    if not card.rows:
        return Section(title=card.card, notes=(*card.notes, *card.skipped), choice=card.card)
    name = re.sub(r"[^a-z0-9]+", "_", card.card.lower()).strip("_")
    num_on_page = NUM_ON_PAGE // len(findings.cards)
    tables = [
        _configurations_table(name, card, findings.dataset_size, num_on_page),
        _largest_table(name, card, num_details, num_on_page),
    ]
    plots = [_fit_plot(f"fit_{name}", card, num_cells)]
    if card.breakdown is not None:
        which = "recommended configuration" if card.recommended else "smallest configuration"
        when = f"optimizer step {card.breakdown.step + 1}, {card.breakdown.phase}"
        tensors = tensors_table(f"tensors_{name}", f"{which}: largest tensors at its peak ({when})", card.breakdown)
        tables.append(replace(tensors, num_in_terminal=num_details))
        panel = categories_panel(card.breakdown)
        plots.append(Plot(name=f"breakdown_{name}", title=f"{which}, by category", panels=(panel,)))
    notes = (*card.reasons, *card.notes, *card.skipped)
    return Section(
        title=card.card,
        headlines=() if card.recommended is None else _headlines(card, card.recommended),
        tables=tuple(tables),
        notes=notes,
        plots=tuple(plots),
        choice=card.card,
    )


def _headlines(card: CardPlan, best: PlannedRow) -> tuple[Headline, ...]:
    """Return what to start with, its memory and speed, and how much of the space fits."""
    budget_mib, peak_mib = card.budget_bytes / MIB, best.peak_bytes / MIB
    fitting = sum(row.fits for row in card.rows)
    return (
        Headline(
            title="start with micro-batch x accumulation",
            value=f"{best.micro_batch_size} x {best.accumulation_steps}",
            detail=label(best.choice),
        ),
        Headline(
            title="predicted peak",
            value=f"{peak_mib:,.0f} MiB",
            detail=f"{budget_mib - peak_mib:,.0f} MiB of headroom in {budget_mib:,.0f}",
        ),
        Headline(
            title="estimated speed",
            value=f"{best.tokens_per_second:,.0f} tokens/s",
            detail=f"{_seconds(best.seconds)} a step, {_percent(best)}",
        ),
        Headline(
            title="predicted to fit", value=f"{fitting} of {len(card.rows)}", detail=f"configurations on {card.card}"
        ),
    )


def _configurations_table(name: str, card: CardPlan, dataset_size: int, num_on_page: int) -> Table:
    best, shown = card.recommended, columns(row.choice for row in card.rows)
    lines = [
        {
            **{shown[key]: row.choice[key] for key in shown},
            "allocated MiB": row.peak_allocated_bytes / MIB,
            **({} if row.peak_reserved_bytes is None else {"reserved MiB": row.peak_reserved_bytes / MIB}),
            **({} if row.peak_device_bytes is None else {"device MiB": row.peak_device_bytes / MIB}),
            "fits": "yes" if row.fits else "no",
            "headroom MiB": (card.budget_bytes - row.peak_bytes) / MIB,
            "seconds per step": row.seconds,
            "tokens/s": row.tokens_per_second,
            "± %": 100 * row.deviation,
            "": "start here" if row is best else "",
        }
        for row in sorted(card.rows, key=lambda row: (not row.fits, expected_order(row)))
    ]
    whole = dict.fromkeys(("allocated MiB", "reserved MiB", "device MiB", "headroom MiB"), "{:,.0f}")
    title = f"predicted for {card.card}, within {card.budget_bytes / MIB:,.0f} MiB"
    updates = math.ceil(dataset_size / (card.rows[0].micro_batch_size * card.rows[0].accumulation_steps))
    note = (
        "Configurations that fit come first, in the order of their estimated tokens per second. "
        f"{updates:,} updates per epoch of {dataset_size:,} sequences."
    )
    return Table(
        name=f"plan_{name}",
        title=title,
        frame=pd.DataFrame(lines),
        forms={**whole, "seconds per step": "{:.3g}", "tokens/s": "{:,.0f}", "± %": "{:.0f}"},
        note=note,
        num_in_terminal=NUM_IN_TERMINAL,
        num_on_page=num_on_page,
    )


def _largest_table(name: str, card: CardPlan, num_in_terminal: int | None, num_on_page: int) -> Table:
    """Return the largest micro-batch that fits for each combination of the other dimensions."""
    largest: dict[tuple[tuple[str, Any], ...], int] = {}
    shown = [key for key in columns(row.choice for row in card.rows) if key != "micro_batch_size"]
    for row in card.rows:
        others = tuple((key, row.choice[key]) for key in shown)
        largest[others] = max(largest.get(others, 0), row.micro_batch_size if row.fits else 0)
    lines = [{**dict(others), "largest micro-batch": size or None} for others, size in largest.items()]
    frame = pd.DataFrame(lines).astype({"largest micro-batch": "Int64"})
    title = "the largest micro-batch that fits"
    return Table(
        name=f"largest_{name}", title=title, frame=frame, num_in_terminal=num_in_terminal, num_on_page=num_on_page
    )


def _cards_table(cards: Sequence[CardPlan]) -> Table:
    """Return a row for each card: its memory and the configuration to start with."""
    lines, shown = [], columns(card.recommended.choice for card in cards if card.recommended is not None)
    for card in cards:
        best = card.recommended
        line: dict[str, Any] = {"card": card.card, "GiB": card.budget_bytes / 2**30}
        if best is not None:
            line |= {shown[key]: str(best.choice[key]) for key in shown}
            line["accumulation"] = str(best.accumulation_steps)
            line["predicted MiB"] = best.peak_bytes / MIB
            line["headroom MiB"] = (card.budget_bytes - best.peak_bytes) / MIB
            line["seconds per step"] = best.seconds
            line["tokens/s"] = best.tokens_per_second
        lines.append(line)
    forms = {"GiB": "{:,.1f}", "predicted MiB": "{:,.0f}", "headroom MiB": "{:,.0f}"}
    forms |= {"seconds per step": "{:.3g}", "tokens/s": "{:,.0f}"}
    return Table(name="cards", title="where to start on each card", frame=pd.DataFrame(lines), forms=forms)


def _fit_plot(name: str, card: CardPlan, num_cells: int) -> Plot:
    """Return a heat map of micro-batch and checkpointing; the other dimensions and the budget are its controls."""
    rows = _of_fastest(card.rows, num_cells)
    most_bytes = max(row.peak_bytes for row in rows)
    unit, unit_bytes = ("GiB", 2**30) if most_bytes >= 2**33 else ("MiB", MIB)
    start = card.recommended or min(rows, key=lambda row: row.peak_bytes)
    sizes = sorted({row.micro_batch_size for row in rows})
    policies = list(dict.fromkeys(str(row.choice.get("checkpointing", "")) for row in rows))
    values = {key: list(dict.fromkeys(str(row.choice[key]) for row in rows)) for key in rows[0].choice}
    controls = [key for key in values if key not in AXES and len(values[key]) > 1]
    cells = [
        {"micro": row.micro_batch_size, "policy": policies.index(str(row.choice.get("checkpointing", "")))}
        | {
            "peak": round(row.peak_bytes / unit_bytes, 3),
            "text": f"{row.peak_bytes / unit_bytes:,.{1 if unit == 'GiB' else 0}f}",
        }
        | {f"of_{place}": str(row.choice[key]) for place, key in enumerate(controls)}
        | {"best": row is card.recommended, "about": _about(row, card)}
        for row in rows
    ]
    chosen = [
        alt.param(
            name=f"of_{place}_chosen",
            value=str(start.choice[key]),
            bind=alt.binding_select(options=values[key], name=heading(key)),
        )
        for place, key in enumerate(controls)
    ]
    budget = card.budget_bytes / unit_bytes
    most = 1.1 * most_bytes / unit_bytes  # a greater budget changes nothing
    bound = alt.param(
        name="budget",
        value=round(budget, 2),
        bind=alt.binding_range(min=0, max=round(most, 2), step=round(most / 500, 3), name=f"budget, {unit}"),
    )
    base = (
        alt.Chart()
        .transform_filter(" && ".join(f"datum.of_{n} == of_{n}_chosen" for n in range(len(controls))) or "true")
        .transform_calculate(share="100 * datum.peak / budget")
        .encode(
            x=alt.X("micro:O", title="micro-batch", sort=sizes, axis=alt.Axis(labelAngle=0, grid=False)),
            y=alt.Y("policy:O", axis=names_axis(policies)),
            **ABOUT,
        )
    )
    legend = alt.Legend(title="% of the budget", gradientLength=200, values=[0, 50, 100, 150, 200])
    chart = layered(
        base.properties(name="cells")
        .mark_rect(cornerRadius=3)
        .encode(color=alt.Color("share:Q", scale=SHARES, legend=legend)),
        base.properties(name="sizes").mark_text(color="#111111").encode(text="text:N"),
        base.transform_filter("datum.best").mark_rect(filled=False, stroke=colour(2), strokeWidth=4, cornerRadius=3),
        data=data(cells),
    ).add_params(bound, *chosen)
    title = f"predicted peak, {unit} (blue fits, red does not{'; green frame: start here' if card.recommended else ''})"
    given = ", ".join(f"{heading(key)} {start.choice[key]}" for key in controls)
    panel = Panel(title=title, chart=chart, height=max(120, 44 * len(policies)))
    of_card = f"what fits {card.card}{f', with {given}' if given else ''}"
    return Plot(name=name, title=of_card, panels=(panel,), is_wide=True)


def _of_fastest(rows: Sequence[PlannedRow], num_cells: int) -> list[PlannedRow]:
    """Return the rows of the combinations of controls that have the fastest configurations that fit."""
    groups: dict[tuple[str, ...], list[PlannedRow]] = {}
    for row in sorted(rows, key=lambda row: (not row.fits, *expected_order(row))):
        groups.setdefault(tuple(str(value) for key, value in row.choice.items() if key not in AXES), []).append(row)
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
        f"{_seconds(row.seconds)} a step, {row.tokens_per_second:,.0f} tokens/s ({_percent(row)})",
    ]
    return "\n".join(lines)
