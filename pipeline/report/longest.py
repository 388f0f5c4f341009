"""The report of a plan with sequence_length=auto: the longest sequences that fit, for each configuration and card."""

import re

import pandas as pd

from pipeline.base.units import MIB
from pipeline.planning.longest import MULTIPLE, CardLengths, LongestFindings
from pipeline.report.page import Report, Section
from pipeline.report.table import Table
from pipeline.searching.results import columns, label

NUM_IN_TERMINAL = 16
"""Configurations of a card that the terminal shows."""


def longest_report(findings: LongestFindings) -> Report:
    """Return the report."""
    return Report(
        entry=findings.entry,
        question=(
            f"How long may the sequences of {findings.model} be at an effective batch of "
            f"{findings.effective_batch_size} on {', '.join(card.card for card in findings.cards)}?"
        ),
        answer=" ".join(_answer(card, findings) for card in findings.cards),
        sections=tuple(_section(card, findings) for card in findings.cards),
        environment=findings.environment,
        settings=findings.settings,
    )


def _answer(card: CardLengths, findings: LongestFindings) -> str:
    best, where = card.longest, f"{card.budget_bytes / MIB:,.0f} MiB of {card.card}"
    if not card.rows:
        return f"{card.card} can run none of the configurations: {'; '.join(card.skipped)}."
    if best is None:
        least = min(row.planned.peak_bytes for row in card.rows) / MIB
        return f"No sequence is predicted to fit {where}: the shortest ones need {least:,.0f} MiB at least."
    end = ", all that the model takes" if best.sequence_length == findings.largest_length else ""
    return (
        f"In {where} sequences of up to {best.sequence_length:,} tokens are predicted to fit{end}: with "
        f"{label(best.planned.choice)}, accumulation_steps {best.planned.accumulation_steps}, a predicted peak of "
        f"{best.planned.peak_bytes / MIB:,.0f} MiB."
    )


def _section(card: CardLengths, findings: LongestFindings) -> Section:
    notes = (*card.notes, *card.skipped)
    if not card.rows:
        return Section(title=card.card, notes=notes)
    shown = columns(row.planned.choice for row in card.rows)
    lines = [
        {
            **{shown[key]: row.planned.choice[key] for key in shown},
            "longest": row.sequence_length,
            "peak MiB": row.planned.peak_bytes / MIB,
            "at the next MiB": None if row.next_peak_bytes is None else row.next_peak_bytes / MIB,
            "tokens/s": row.planned.tokens_per_second if row.sequence_length else None,
            "± %": 100 * row.planned.deviation,
        }
        for row in sorted(card.rows, key=lambda row: -(row.sequence_length or 0))
    ]
    frame = pd.DataFrame(lines).astype({"longest": "Int64"})
    name = re.sub(r"[^a-z0-9]+", "_", card.card.lower()).strip("_")
    table = Table(
        name=f"longest_{name}",
        title=f"the longest sequences that fit {card.card}, within {card.budget_bytes / MIB:,.0f} MiB",
        frame=frame,
        forms={"peak MiB": "{:,.0f}", "at the next MiB": "{:,.0f}", "tokens/s": "{:,.0f}", "± %": "{:.0f}"},
        note=(
            f"Multiples of {MULTIPLE} tokens, at most {findings.largest_length:,}. Of each the next one was predicted "
            "too, and does not fit. Without a length not even the shortest fits, whose peak is shown."
        ),
        num_in_terminal=NUM_IN_TERMINAL,
    )
    return Section(title=card.card, tables=(table,), notes=notes)
