"""Kinds: the configuration in which each kind of fine-tuning was compared."""

from collections.abc import Sequence

from pipeline.config.given import written
from pipeline.report.page import Section
from pipeline.report.table import Table
from pipeline.training.metrics import Row

CHOSEN = ("micro_batch_size", "checkpointing", "precision", "loss_kernel")
"""Dimensions of the compared space in experiments/finetune.yaml."""


def section(rows: Sequence[Row]) -> Section:
    """Return the table `kinds`, and a note on what a comparison of kinds says."""
    lines = [
        {"kind": row.name, **{name: written(row.params.get(name)) for name in CHOSEN}}
        for row in rows
        if row.skipped is None
    ]
    note = (
        "Each kind was trained in the configuration that is expected to be its fastest within the budget, so they may "
        "differ in more than the kind. The fastest configuration of one kind is the answer of the search that follows, "
        "which has a page of its own."
    )
    title = "the configuration of each kind"
    tables = (Table.of("kinds", title, lines),) if lines else ()
    return Section(title=title, tables=tables, notes=(note,))
