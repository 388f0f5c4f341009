"""The report of a plan: what every configuration would need on each card, which fit, and the one to begin with."""

import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from pipeline.base.units import MIB
from pipeline.prediction.plan import CardPlan, PlanFindings, expected_order
from pipeline.report.breakdown import categories_panel, tensors_table
from pipeline.report.page import Report, Section
from pipeline.report.planned import fit_plot
from pipeline.report.plot import Plot
from pipeline.report.table import Table
from pipeline.searching.results import heading, label


def plan_report(findings: PlanFindings) -> Report:
    """Return the report."""
    sections = [_card_section(card, findings) for card in findings.cards]
    if len(findings.cards) > 1:
        sections.insert(0, Section(title="cards", tables=(_cards_table(findings.cards),)))
    return Report(
        entry=findings.entry,
        question=(
            f"What would {findings.model} need at an effective batch of {findings.effective_batch_size} on "
            f"{', '.join(card.card for card in findings.cards)}?"
        ),
        answer=" ".join(_answer(card) for card in findings.cards),
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
            f"Nothing is predicted to fit {budget:,.0f} MiB of {card.card}: the leanest configuration needs "
            f"{smallest:,.0f} MiB."
        )
    fitting = sum(row.fits for row in card.rows)
    return (
        f"On {card.card} {fitting} of {len(card.rows)} configurations are predicted to fit {budget:,.0f} MiB. "
        f"Begin with {label(best.choice)} ({best.accumulation_steps} forward passes an update): it is predicted to "
        f"peak at {best.peak_bytes / MIB:,.0f} MiB, {budget - best.peak_bytes / MIB:,.0f} MiB of headroom. That it is "
        "the fastest is an estimate from counted operations; a search measures it."
    )


def _card_section(card: CardPlan, findings: PlanFindings) -> Section:
    if not card.rows:
        return Section(title=card.card, notes=card.skipped)
    name = re.sub(r"[^a-z0-9]+", "_", card.card.lower()).strip("_")
    tables = [_configurations_table(name, card, findings.dataset_size), _largest_table(name, card)]
    plots = [fit_plot(f"fit_{name}", f"what fits {card.card}", card.rows, card.budget_bytes)]
    if card.anatomy is not None:
        which = "the recommended one" if card.recommended else "the leanest one"
        when = f"optimizer step {card.anatomy.step + 1}, {card.anatomy.phase}"
        tables.append(tensors_table(f"tensors_{name}", f"{which}: largest tensors at its peak ({when})", card.anatomy))
        panel = categories_panel(card.anatomy)
        plots.append(Plot(name=f"breakdown_{name}", title=f"{which}, by category", panels=(panel,)))
    return Section(title=card.card, tables=tuple(tables), notes=card.skipped, plots=tuple(plots))


def _configurations_table(name: str, card: CardPlan, dataset_size: int) -> Table:
    best = card.recommended
    lines = [
        {
            **{heading(key): value for key, value in row.choice.items()},
            "allocated MiB": row.peak_allocated_bytes / MIB,
            **({} if row.peak_reserved_bytes is None else {"reserved MiB": row.peak_reserved_bytes / MIB}),
            **({} if row.peak_device_bytes is None else {"device MiB": row.peak_device_bytes / MIB}),
            "fits": "yes" if row.fits else "no",
            "headroom MiB": (card.budget_bytes - row.peak_bytes) / MIB,
            "TFLOP a step": row.flops / 1e12,
            "forward passes an epoch": math.ceil(dataset_size / row.micro_batch_size),
            "": "begin here" if row is best else "",
        }
        for row in sorted(card.rows, key=lambda row: (not row.fits, expected_order(row)))
    ]
    whole = dict.fromkeys(("allocated MiB", "reserved MiB", "device MiB", "headroom MiB"), "{:,.0f}")
    title = f"predicted for {card.card}, within {card.budget_bytes / MIB:,.0f} MiB"
    updates = math.ceil(dataset_size / (card.rows[0].micro_batch_size * card.rows[0].accumulation_steps))
    note = (
        "Those that fit first, the expected fastest on top: an estimate from counted operations. "
        f"{updates:,} updates an epoch of {dataset_size:,} sequences."
    )
    return Table(
        name=f"plan_{name}",
        title=title,
        frame=pd.DataFrame(lines),
        forms={**whole, "TFLOP a step": "{:,.2f}"},
        note=note,
    )


def _largest_table(name: str, card: CardPlan) -> Table:
    """Return the largest micro-batch that fits, for every combination of the other dimensions."""
    largest: dict[tuple[tuple[str, Any], ...], int] = {}
    for row in card.rows:
        others = tuple((key, value) for key, value in row.choice.items() if key != "micro_batch_size")
        largest[others] = max(largest.get(others, 0), row.micro_batch_size if row.fits else 0)
    lines = [{**dict(others), "largest micro-batch": size or None} for others, size in largest.items()]
    frame = pd.DataFrame(lines).astype({"largest micro-batch": "Int64"})
    return Table(name=f"largest_{name}", title="the largest micro-batch that fits", frame=frame)


def _cards_table(cards: Sequence[CardPlan]) -> Table:
    """Return a line a card: its memory, and what to begin with there."""
    lines = []
    for card in cards:
        best = card.recommended
        line: dict[str, Any] = {"card": card.card, "GiB": card.budget_bytes / 2**30}
        if best is not None:
            line |= {heading(key): str(value) for key, value in best.choice.items()}
            line["accumulation"] = str(best.accumulation_steps)
            line["predicted MiB"] = best.peak_bytes / MIB
            line["headroom MiB"] = (card.budget_bytes - best.peak_bytes) / MIB
        lines.append(line)
    forms = {"GiB": "{:,.1f}", "predicted MiB": "{:,.0f}", "headroom MiB": "{:,.0f}"}
    return Table(name="cards", title="what to begin with on each card", frame=pd.DataFrame(lines), forms=forms)
