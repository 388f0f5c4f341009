"""The report of a plan: the predicted memory of every configuration on each card, and the one to start with."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm

from pipeline.base.units import MIB
from pipeline.prediction.plan import CardPlan, PlanFindings, PlannedRow, expected_order
from pipeline.report.breakdown import categories_panel, tensors_table
from pipeline.report.page import Report, Section
from pipeline.report.plot import Plot
from pipeline.report.table import Table
from pipeline.searching.results import columns, label

Others = tuple[tuple[str, Any], ...]
"""The values of a configuration's dimensions other than those of a plot's axes."""

NUM_IN_TERMINAL = 8
"""Configurations of a card that the terminal shows."""
NUM_PANELS = 6
"""Heat maps of a card."""
ESTIMATED = (
    "Times are estimated from what a step computes, moves and launches and from the device's data sheet; a search "
    "measures them."
)


def plan_report(findings: PlanFindings) -> Report:
    """Return the report; the terminal shows the details of a card if it is the only one."""
    several = len(findings.cards) > 1
    recommended = any(card.recommended for card in findings.cards)
    sections = [_card_section(card, findings, num_details=0 if several else None) for card in findings.cards]
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


def _card_section(card: CardPlan, findings: PlanFindings, num_details: int | None) -> Section:
    if not card.rows:
        return Section(title=card.card, notes=(*card.notes, *card.skipped))
    name = re.sub(r"[^a-z0-9]+", "_", card.card.lower()).strip("_")
    tables = [_configurations_table(name, card, findings.dataset_size), _largest_table(name, card, num_details)]
    plots = [_fit_plot(f"fit_{name}", f"what fits {card.card}", card.rows, card.budget_bytes)]
    if card.breakdown is not None:
        which = "recommended configuration" if card.recommended else "smallest configuration"
        when = f"optimizer step {card.breakdown.step + 1}, {card.breakdown.phase}"
        tensors = tensors_table(f"tensors_{name}", f"{which}: largest tensors at its peak ({when})", card.breakdown)
        tables.append(replace(tensors, num_in_terminal=num_details))
        panel = categories_panel(card.breakdown)
        plots.append(Plot(name=f"breakdown_{name}", title=f"{which}, by category", panels=(panel,)))
    notes = (*card.reasons, *card.notes, *card.skipped)
    return Section(title=card.card, tables=tuple(tables), notes=notes, plots=tuple(plots))


def _configurations_table(name: str, card: CardPlan, dataset_size: int) -> Table:
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
    )


def _largest_table(name: str, card: CardPlan, num_in_terminal: int | None) -> Table:
    """Return the largest micro-batch that fits for each combination of the other dimensions."""
    largest: dict[tuple[tuple[str, Any], ...], int] = {}
    shown = [key for key in columns(row.choice for row in card.rows) if key != "micro_batch_size"]
    for row in card.rows:
        others = tuple((key, row.choice[key]) for key in shown)
        largest[others] = max(largest.get(others, 0), row.micro_batch_size if row.fits else 0)
    lines = [{**dict(others), "largest micro-batch": size or None} for others, size in largest.items()]
    frame = pd.DataFrame(lines).astype({"largest micro-batch": "Int64"})
    title = "the largest micro-batch that fits"
    return Table(name=f"largest_{name}", title=title, frame=frame, num_in_terminal=num_in_terminal)


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


def _fit_plot(name: str, title: str, rows: Sequence[PlannedRow], budget_bytes: int) -> Plot:
    """Return heat maps for combinations of the dimensions other than micro-batch and checkpointing.

    Where these are many, they are those with the fastest configurations that fit.
    """
    groups: dict[Others, list[PlannedRow]] = {}
    for row in rows:
        axes = ("micro_batch_size", "checkpointing")
        others = tuple((key, value) for key, value in row.choice.items() if key not in axes)
        groups.setdefault(others, []).append(row)
    panels = tuple(
        partial(
            _heat_map, rows=group, budget_bytes=budget_bytes, title=label(dict(others)) if others else "peak memory"
        )
        for others, group in _fastest(groups)
    )
    return Plot(name=name, title=title, panels=panels)


def _fastest(groups: Mapping[Others, list[PlannedRow]]) -> list[tuple[Others, list[PlannedRow]]]:
    """Return the groups to draw, in their order, with the fastest configurations that fit."""

    def speed(others: Others) -> tuple[Any, ...]:
        return min((not row.fits, *expected_order(row)) for row in groups[others])

    chosen = sorted(groups, key=speed)[:NUM_PANELS]
    return [(others, group) for others, group in groups.items() if others in chosen]


def _heat_map(axes: Axes, *, rows: Sequence[PlannedRow], budget_bytes: int, title: str) -> None:
    """Draw each configuration's share of the budget: blue fits, red does not, a black line divides them."""
    sizes = sorted({row.micro_batch_size for row in rows})
    policies = list(dict.fromkeys(str(row.choice.get("checkpointing", "")) for row in rows))
    shares, fits = np.full((2, len(policies), len(sizes)), np.nan)
    for row in rows:
        place = policies.index(str(row.choice.get("checkpointing", ""))), sizes.index(row.micro_batch_size)
        shares[place], fits[place] = 100 * row.peak_bytes / budget_bytes, row.fits
        text = f"{row.peak_bytes / 2**30:.1f}" if budget_bytes >= 2**31 else f"{row.peak_bytes / MIB:,.0f}"
        axes.text(place[1], place[0], text, ha="center", va="center", fontsize="x-small")
    axes.imshow(np.clip(shares, 0, 200), cmap="RdBu_r", norm=TwoSlopeNorm(100, 0, 200), alpha=0.7, aspect="auto")
    for y, x in np.argwhere(fits == 1):
        if x + 1 < len(sizes) and fits[y, x + 1] == 0:
            axes.plot([x + 0.5, x + 0.5], [y - 0.5, y + 0.5], color="black", lw=2.5)
        for other in (y - 1, y + 1):
            if 0 <= other < len(policies) and fits[other, x] == 0:
                axes.plot([x - 0.5, x + 0.5], [(y + other) / 2] * 2, color="black", lw=2.5)
    unit = "GiB" if budget_bytes >= 2**31 else "MiB"
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(policies)), policies, fontsize="small")
    axes.set(title=f"{title}: predicted peak, {unit}", xlabel="micro-batch (black: the budget's boundary)")
