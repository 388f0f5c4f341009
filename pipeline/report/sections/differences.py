"""Differences: the settings in which runs differ, and the metrics that do not compare because of them."""

from collections.abc import Sequence

from pipeline.base.by_key import grouped
from pipeline.config.given import written
from pipeline.report.comparable import incomparable
from pipeline.report.page import Section
from pipeline.report.table import Table
from pipeline.training.metrics import Row


def section(rows: Sequence[Row]) -> Section:
    """Return the tables `differences` (of settings, by value) and `not_comparable` of the runs, if there are any."""
    rows = [row for row in rows if row.skipped is None]
    if not rows:
        return Section(title="differences")
    names = dict.fromkeys(name for row in rows for name in row.params)
    values = {name: grouped((written(row.params.get(name)), row.name) for row in rows) for name in names}
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
        tables.append(Table.of("differences", "settings that differ", lines))
    if flagged:
        tables.append(Table.of("not_comparable", "what is not comparable", flagged, note=note))
    return Section(title="differences", tables=tuple(tables))
