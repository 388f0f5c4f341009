"""Other trainings in a comparison: their losses beside those of AdamW on all weights in float32."""

import statistics
from collections.abc import Sequence

from pipeline.base.technique import Mathematics
from pipeline.config.settings import TECHNIQUES
from pipeline.report.comparable import of_other_data
from pipeline.report.curves import curves
from pipeline.report.losses import colour_numbers, in_common
from pipeline.report.page import Section
from pipeline.report.plot import Plot
from pipeline.report.table import Table
from pipeline.training.metrics import Row

REFERENCE = "AdamW on all weights in float32"
FORMS = {"loss": "{:.4f}", **dict.fromkeys(("difference", "mean", "held out"), "{:+.4f}")}
"""Formats of the table's numbers."""


def other_trainings(comparison: str, rows: Sequence[Row]) -> Section | None:
    """Return table and plot of the runs of a comparison that are another training; None if there are none."""
    trained = [row for row in rows if row.steps]
    changed = {row.name: changes(row) for row in trained}
    others = [row for row in trained if changed[row.name]]
    if not others:
        return None
    plain = sorted((row for row in trained if not changed[row.name]), key=lambda row: not row.is_baseline)
    title = f"other trainings beside {REFERENCE}"
    if not plain:
        names = ", ".join(row.name for row in others)
        note = f"Another training than {REFERENCE}, which has not been measured here: {names}. So no losses compare."
        return Section(title=title, notes=(note,))
    reference = plain[0]
    compared = [row for row in others if not of_other_data(row, reference) and _pairs(row, reference)]
    if not compared:
        return None
    lines = [{**_line(row, reference), "changed": changed[row.name]} for row in compared]
    note = (
        f"{reference.name} is {REFERENCE}. The others train with other mathematics, so their losses are expected to "
        f"differ. Loss and difference from {reference.name} are those of the last step that both "
        "have taken, the mean is over all such steps, and held out is the difference at the end. Learning rates are "
        "those of each run: one that suits AdamW may not suit the others."
    )
    return Section(
        title=title,
        tables=(Table.of(f"{comparison}_other_trainings", title, lines, forms=FORMS, note=note),),
        plots=()
        if reference.is_baseline  # whose differences are below the losses of the comparison
        else (_plot(f"{comparison}_other_trainings", title, rows, reference, compared),),
    )


def changes(row: Row) -> str:
    """Return the settings of a run by which techniques make it another training; empty if none does."""
    found = []
    for kind in TECHNIQUES.values():
        own = {name: row.params[name] for name in kind.model_fields if name in row.params}
        try:
            mathematics = kind(**own).mathematics
        except ValueError:  # a run that MLflow has of another version
            continue
        if mathematics is Mathematics.DIFFERENT:
            found += [f"{name}={value}" for name, value in own.items() if value != kind.model_fields[name].default]
    return ", ".join(found)


def _line(row: Row, reference: Row) -> dict[str, object]:
    pairs = _pairs(row, reference)
    differences = [own - other for _, own, other in pairs]
    values: dict[str, object] = {
        "variant": row.name,
        "steps": len(pairs),
        "loss": pairs[-1][1],
        "difference": differences[-1],
        "mean": statistics.fmean(differences),
    }
    if "eval_loss" in row.metrics and "eval_loss" in reference.metrics:
        values["held out"] = row.metrics["eval_loss"] - reference.metrics["eval_loss"]
    return values


def _pairs(row: Row, reference: Row) -> list[tuple[float, float, float]]:
    """Return the number, counted from 1, and the losses of each step that both have."""
    own, other = ([(record.step + 1, record.loss) for record in each.steps] for each in (row, reference))
    return in_common(own, other)


def _plot(name: str, title: str, rows: Sequence[Row], reference: Row, compared: Sequence[Row]) -> Plot:
    pairs = {row.name: _pairs(row, reference) for row in (reference, *compared)}
    last, numbers = max(pairs[row.name][-1][0] for row in compared), colour_numbers(rows)
    losses = {run: [(step, own) for step, own, _ in found if step <= last] for run, found in pairs.items()}
    differences = {
        run: [(step, own - other) for step, own, other in found if step <= last] for run, found in pairs.items()
    }
    panels = (
        curves("loss in the steps that both have", losses, "loss", colour_numbers=numbers),
        curves(f"loss less that of {reference.name}", differences, "difference", colour_numbers=numbers),
    )
    return Plot(name=name, title=title, panels=panels)
