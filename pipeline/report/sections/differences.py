"""Differences: the settings in which runs differ, and the metrics that do not compare because of them."""

from collections.abc import Mapping, Sequence

import pandas as pd

from pipeline.report.page import Section
from pipeline.report.table import Table
from pipeline.training.metrics import Row

CONDITIONS: Mapping[str, tuple[str, ...]] = {
    "effective batch": ("effective_batch_size",),
    "corpus": ("corpus", "corpus_digest", "sequences", "sequence_length"),
    "device": ("device", "device_name"),
    "model": ("model",),
}
"""Conditions under which metrics compare, and the settings that record them."""
PADDED = ("fixed_length", "padded", "grouped")
"""Values of `sequences` that are one training."""


def incomparable(row: Row, other: Row) -> set[str]:
    """Return the CONDITIONS in which two runs differ."""
    return {
        condition
        for condition, names in CONDITIONS.items()
        if any(_trained(row, name) != _trained(other, name) for name in names)
    }


def section(rows: Sequence[Row]) -> Section:
    """Return the tables `differences` (of settings, by value) and `not_comparable` of the runs, if there are any."""
    rows = [row for row in rows if row.skipped is None]
    if not rows:
        return Section(title="differences")
    names = dict.fromkeys(name for row in rows for name in row.params)
    values = {name: _by_value(rows, name) for name in names}
    lines = [
        {"setting": name, "value": value, "runs": ", ".join(runs)}
        for name, groups in values.items()
        if len(groups) > 1
        for value, runs in groups.items()
    ]
    baseline = next((row for row in rows if row.is_baseline), rows[0])
    flags = {row.name: incomparable(row, baseline) for row in rows}
    flagged = [{"run": name, "other": ", ".join(sorted(flag))} for name, flag in flags.items() if flag]
    note = (
        f"Compared with {baseline.name}. With another effective batch, memory and time per sample are comparable, and "
        "the loss is not."
    )
    tables = []
    if lines:
        tables.append(Table(name="differences", title="settings that differ", frame=pd.DataFrame(lines)))
    if flagged:
        frame = pd.DataFrame(flagged)
        tables.append(Table(name="not_comparable", title="what is not comparable", frame=frame, note=note))
    return Section(title="differences", tables=tuple(tables))


def _by_value(rows: Sequence[Row], name: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(_written(row.params.get(name)), []).append(row.name)
    return groups


def _trained(row: Row, name: str) -> str:
    """Return a run's setting as far as it changes the training, which padding does not."""
    written = _written(row.params.get(name))
    return "padded" if name == "sequences" and written in PADDED else written


def _written(value: object) -> str:
    """Return a setting as it is written on the command line."""
    return "none" if value is None else str(value)
