"""The lengths of a corpus's documents: a histogram, and what truncation at each of some lengths loses and needs."""

from collections.abc import Sequence

import altair as alt

from pipeline.base.units import MIB, mib
from pipeline.data._support.truncation import LengthBin, Truncation
from pipeline.report.page import Section
from pipeline.report.plot import ABOUT, WARNING, Panel, Plot, colour, data, layered
from pipeline.report.table import Table
from pipeline.training.metrics import Row

FORMS = dict.fromkeys(("whole %", "tokens lost %", "targets lost %"), "{:.1f}") | {"predicted peak MiB": "{:,.1f}"}
TITLE = "lengths of documents, and what truncation at each loses and needs"


def lengths_section(row: Row, truncations: Sequence[Truncation], lengths: Sequence[LengthBin]) -> tuple[Section, ...]:
    """Return the table of truncations and the histogram, if there are any; peaks are those of the run `row`."""
    if not truncations:
        return ()
    own = row.params["sequence_length"]
    lines = [
        {
            "sequence_length": f"{one.length} *" if one.length == own else str(one.length),
            "whole %": one.whole_percent,
            "tokens lost %": one.lost_tokens_percent,
            "targets lost %": one.lost_targets_percent,
            "left out": one.num_left_out,
            "predicted peak MiB": mib(one.peak_bytes),
        }
        for one in truncations
    ]
    note = f"* this run; peaks are those of {row.name}"
    table = Table.of("lengths", TITLE, lines, forms=FORMS, note=note)
    plots = (Plot(name="lengths", title=TITLE, panels=(_histogram(truncations, lengths),)),) if lengths else ()
    return (Section(title="lengths", tables=(table,), plots=plots),)


def _histogram(truncations: Sequence[Truncation], lengths: Sequence[LengthBin]) -> Panel:
    """Return the number of documents by length, and a dashed line for each truncation with its effect."""
    bins = [
        {
            "start": one.start - 0.5,
            "end": one.end + 0.5,
            "documents": one.num_documents,
            "none": 0,
            "about": f"{one.num_documents:,} documents of {one.start:,} to {one.end:,} tokens",
        }
        for one in lengths
    ]
    cuts = [{"length": one.length, "about": _about(one)} for one in truncations if one.length <= lengths[-1].end]
    documents = alt.Chart(data(bins)).mark_bar(color=colour(0))
    cut = alt.Chart(data(cuts)).mark_rule(color=WARNING, strokeDash=[6, 3], strokeWidth=2)
    return Panel(
        title="documents by length (dashed: the lengths of the table)",
        chart=layered(
            documents.encode(
                x=alt.X("start:Q", title="tokens", scale=alt.Scale(zero=False, nice=False)),
                x2="end:Q",
                y=alt.Y("documents:Q", title="documents", axis=alt.Axis(tickMinStep=1)),
                y2="none:Q",
                **ABOUT,
            ),
            cut.encode(x="length:Q", **ABOUT),
        ),
    )


def _about(one: Truncation) -> str:
    need = "" if one.peak_bytes is None else f"; predicted peak {one.peak_bytes / MIB:,.1f} MiB"
    lost = f"{one.lost_tokens_percent:.1f} % of the tokens and {one.lost_targets_percent:.1f} % of the targets lost"
    return f"at most {one.length:,} tokens: {one.whole_percent:.1f} % of the documents whole, {lost}{need}"
