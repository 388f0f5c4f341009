"""What every comparison shows: a table, and a 2x2 figure."""

import io
from collections.abc import Sequence

import matplotlib
import pandas as pd
from rich import box
from rich.table import Table

matplotlib.use("agg")  # no screen is needed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.contracts import Outcome
from pipeline.metrics import Row

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette, which colour-blind readers can tell apart (jfly.uni-koeln.de/color)."""
LINES = ("-", "--", "-.", ":")

COLUMNS = {
    "peak_allocated_mib": ("peak MiB", "{:,.1f}"),
    "memory_saving_percent": ("saved %", "{:+.1f}"),
    "seconds_per_step": ("s/step", "{:.4f}"),
    "time_overhead_percent": ("time %", "{:+.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "final_loss": ("final loss", "{:.4f}"),
    "max_loss_difference": ("loss diff.", "{:.2g}"),
}
"""Figures of the terminal's table: heading and form."""


def comparison_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return one line a variant: where it belongs, its outcome, every setting and every figure."""
    return pd.DataFrame(
        {
            "comparison": row.comparison,
            "variant": row.name,
            "baseline": row.is_baseline,
            "outcome": row.result.outcome.value if row.result else "skipped",
            "detail": row.skipped or (row.result.detail if row.result else None),
            **row.params,
            **row.figures,
        }
        for row in rows
    )


def terminal_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the table of one comparison; a star marks the baseline."""
    caption = "* the baseline" if len(rows) > 1 else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    shown = {name: form for name, form in COLUMNS.items() if any(name in row.figures for row in rows)}
    table.add_column("variant", no_wrap=True)
    outcomes = [row.result.outcome.value if row.result else "skipped" for row in rows]
    all_ok = set(outcomes) == {Outcome.OK}
    if not all_ok:
        table.add_column("outcome", no_wrap=True)
    for heading, _ in shown.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row, outcome in zip(rows, outcomes, strict=True):
        label = f"{row.name} *" if row.is_baseline and len(rows) > 1 else row.name
        cells = [form.format(row.figures[name]) if name in row.figures else "" for name, (_, form) in shown.items()]
        table.add_row(label, *([] if all_ok else [outcome]), *cells)
    return table


def frame_table(title: str, frame: pd.DataFrame) -> Table:
    """Return any frame as a table for the terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in frame.columns:
        table.add_column(str(name), justify="left" if frame[name].dtype.kind in "OUT" else "right")
    for values in frame.itertuples(index=False):
        table.add_row(
            *("" if pd.isna(value) else f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values)
        )
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each variant that did not end well or was left out."""
    sentences = []
    for row in rows:
        if row.skipped:
            sentences.append(f"{row.name}: skipped, {row.skipped}")
        elif row.result is not None and row.result.detail:
            sentences.append(f"{row.name}: {row.result.outcome}, {row.result.detail}")
    return sentences


def overview_figure(title: str, rows: Sequence[Row]) -> bytes:
    """Return a PNG: loss curves, mean loss, time per optimizer step and peak memory of one comparison."""
    figure = Figure(figsize=(12, 8), layout="constrained", dpi=120)
    ((losses, means), (times, peaks)) = figure.subplots(2, 2)
    _loss_curves(losses, rows)
    _bars(means, rows, "mean_loss", "mean loss over all steps", "loss")
    _bars(
        times,
        rows,
        "seconds_per_step",
        "time per optimizer step (median, quartiles)",
        "seconds",
        "seconds_per_step_iqr",
    )
    _bars(peaks, rows, "peak_allocated_mib", "peak memory in live tensors", "MiB")
    figure.suptitle(title)
    return to_png(figure)


def to_png(figure: Figure) -> bytes:
    """Return the figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def over_steps(axes: Axes, title: str, unit: str) -> None:
    """Label axes on which curves run over optimizer steps, counted from 1."""
    axes.set(title=title, xlabel="optimizer step", ylabel=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(fontsize="small")


def colour(index: int) -> str:
    """Return the colour of the series of this number."""
    return COLOURS[index % len(COLOURS)]


def _loss_curves(axes: Axes, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        if row.result is not None and row.result.steps:
            steps = [record.step + 1 for record in row.result.steps]
            line = LINES[index % len(LINES)]
            axes.plot(steps, [record.loss for record in row.result.steps], line, color=colour(index), label=row.name)
    over_steps(axes, "loss", "loss")


def _bars(axes: Axes, rows: Sequence[Row], name: str, title: str, unit: str, spread: str | None = None) -> None:
    """Draw one bar a variant; where a variant has no such figure, its outcome stands in the bar's place."""
    longest = max((row.figures.get(name, 0.0) for row in rows), default=0.0) or 1.0
    for index, row in enumerate(rows):
        value, half = row.figures.get(name), row.figures.get(spread, 0.0) / 2 if spread else 0.0
        if value is None:
            text, end = (row.result.outcome.value if row.result else "skipped").replace("_", " "), 0.0
        else:
            text, end = f"{value:.3g}" if value < 100 else f"{value:,.0f}", value + half
            axes.barh(index, value, xerr=half or None, capsize=3, color=colour(index))
        axes.annotate(text, (end + longest * 0.02, index), va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(title=title, xlabel=unit, xlim=(0, longest * 1.2))
    axes.grid(axis="x", alpha=0.3)
