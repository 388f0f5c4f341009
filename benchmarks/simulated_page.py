"""The page that benchmarks/cuda_without_gpu.py writes."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

SHOWN = ("processor", "cores", "host_memory_mib", "system", "python", "torch", "cuda", "transformers")
"""Conditions besides the settings."""
HEAD = ("card", "configurations", "out of memory", *("allocated: exact", "median", "worst"))
HEAD += ("reserved: exact", "median", "worst")
Row = Mapping[str, str]


def summary(rows: Sequence[Row], budgets: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table with the errors on each card and on all of them, and a line on budgets."""
    if rows:
        yield from _of_cards(rows)
    if budgets:
        exact, median, worst = _errors(budgets, "budget_bytes", "error_percent")
        yield ""
        yield f"Smallest budget: {len(budgets)} configurations, {exact} exact, median error {median}, worst {worst}."


def _of_cards(rows: Sequence[Row]) -> Iterator[str]:
    yield "| " + " | ".join(HEAD) + " |"
    yield "|---" + "|---:" * (len(HEAD) - 1) + "|"
    cards = list(dict.fromkeys(row["card"] for row in rows))
    for card in [*cards, "all"]:
        ran = [row for row in rows if card in ("all", row["card"])]
        completed = [row for row in ran if row["outcome"] == "ok"]
        cells = [card, str(len(ran)), str(len(ran) - len(completed))]
        for quantity in ("allocated", "reserved"):
            cells += _errors(completed, f"{quantity}_bytes", f"{quantity}_error_percent")
        yield "| " + " | ".join(cells) + " |"


def _errors(rows: Sequence[Row], quantity: str, error: str) -> list[str]:
    """Return the number of predictions that are exact to the byte, the median error and the worst."""
    if not rows:
        return ["", "", ""]
    exact = sum(row[f"predicted_{quantity}"] == row[f"measured_{quantity}"] for row in rows)
    sizes = [abs(float(row[error])) for row in rows]
    return [str(exact), f"{statistics.median(sizes):.4f} %", f"{max(sizes):.4f} %"]


def page(rows: Sequence[Row], budgets: Sequence[Row], about: Row, date: str) -> str:
    """Return the tables as Markdown."""
    lines = [
        f"# Predicted peaks and those of the real CUDA allocator on simulated cards, {date}",
        "",
        "Written by `python benchmarks/cuda_without_gpu.py`, without a GPU. PyTorch's own CUDA build and its caching "
        "allocator are real; the card below them is simulated: its kernels compute nothing. Each configuration is "
        "predicted, then trained for three optimizer steps in a process of its own. Error is predicted / real - 1.",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {about[name]} |" for name in SHOWN if name in about),
        "",
        *summary(rows, budgets),
        "",
        *(_budgets(budgets) if budgets else ()),
        "## All configurations",
        "",
        "| configuration | allocated: predicted MiB | real | error | reserved: predicted MiB | real | error |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *("| " + " | ".join([row["name"], *_cells(row)]) + " |" for row in rows),
    ]
    return "\n".join([*lines, ""])


def _budgets(budgets: Sequence[Row]) -> list[str]:
    return [
        "## Smallest budgets",
        "",
        "The smallest budget, in steps of 2 MiB, that `Prediction.fits` accepts, and the one within which a real run "
        "with that cap stays (bisection).",
        "",
        "| configuration | predicted MiB | real MiB | error |",
        "|---|---:|---:|---:|",
        *(
            f"| {row['name']} | {_mib(row['predicted_budget_bytes'])} | {_mib(row['measured_budget_bytes'])} | "
            f"{_percent(row['error_percent'])} |"
            for row in budgets
        ),
        "",
    ]


def _cells(row: Row) -> Iterator[str]:
    for quantity in ("allocated", "reserved"):
        yield _mib(row[f"predicted_{quantity}_bytes"])
        yield _mib(row[f"measured_{quantity}_bytes"]) if row["outcome"] == "ok" else row["outcome"]
        yield _percent(row[f"{quantity}_error_percent"])


def _mib(num_bytes: str) -> str:
    return f"{int(num_bytes) / 2**20:,.2f}"


def _percent(error: str) -> str:
    return f"{float(error):+.4f} %" if error else ""
