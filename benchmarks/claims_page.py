"""The page of the claims as Markdown: verdicts, every condition, and the runs that failed."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from claims_evaluation import Row, number, spread, summarize
from claims_spec import Claims

OMITTED = ("tokenizers", "optuna")
"""Versions on which no claim depends."""
HOW_TO_READ = """\
A variant is compared with its baseline in runs of the same seed, which share the weights and the sequences; the median
and the spread (least to greatest) are over the seeds. Each run had a process of its own; for each seed the commands ran
in random order, the variants of one command after its baseline. Memory is the peak of live tensors
(`peak_allocated_mib`), time is per sample, from the median step after the first two. Under a condition a claim holds
where the median is within the claimed range; the tolerance (±) is ours. What ran out of memory or over its budget is a
result like any other. In the first table `measured` is the range of the medians over all conditions; the tables below
it have each condition."""


def page(
    table: pd.DataFrame,
    claims: Claims,
    form: str,
    rows: Sequence[tuple[str, Row]],
    about: Mapping[str, str],
    origin: str,
) -> str:
    """Return the page; `rows` are the runs that the table follows from, each after its command."""
    summary = summarize(table)
    names = list(dict.fromkeys(table.claim))
    for name in names:
        first = summary.index[summary.claim == name][0]
        summary.loc[first, "says"] = f"**{name}**: {claims.claims[name].says}"
    summary["conditions"] = [f"[{line.conditions}](#{line.claim})" for line in summary.itertuples()]
    facts = [(name, value) for name, value in about.items() if name not in OMITTED]
    columns = {"says": "claim", "what": "metric"}
    parts = [
        f"# What people say about training memory, measured: {form} form, {about['date']}",
        f"{origin} {claims.forms[form].note}",
        f"{len(rows)} runs; seeds behind each value: {spread(table.runs)}.",
        HOW_TO_READ,
        markdown(pd.DataFrame(facts, columns=["what", "value"])),
        markdown(summary[["says", "what", "conditions", "claimed", "measured", "verdict"]].rename(columns=columns)),
    ]
    for name in names:
        claim = claims.claims[name]
        lines = table[table.claim == name].apply(_cells, axis=1)
        parts += [f"## {name}", f"*{claim.says}.* Source: {claim.source}.", markdown(lines)]
    return "\n\n".join([*parts, "## Runs that did not fit, or did not end well", _others(rows)]) + "\n"


def markdown(frame: pd.DataFrame) -> str:
    """Return a table as Markdown; what is missing is empty."""
    cells = [list(frame.columns), ["---"] * len(frame.columns), *frame.fillna("").to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in cells)


def _cells(line: pd.Series) -> pd.Series:
    known = line.runs > 0
    return pd.Series(
        {
            "metric": line["what"],
            "condition": line.condition,
            "claimed": f"{line.claimed} {line.unit}",
            "median": f"{number(line['median'])} {line.unit}" if known else "",
            "least to greatest": spread([line.least, line.greatest]) if known else "",
            "runs": line.runs,
            "verdict": line.verdict,
        }
    )


def _others(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the runs that failed, grouped by command."""
    counts: Counter[tuple[str, str]] = Counter()
    details: dict[str, str] = {}
    for command, row in rows:
        if row["result"] is not None and row["result"]["outcome"] != "ok":
            counts[command, row["result"]["outcome"]] += 1
            details[command] = (row["result"]["detail"] or "").partition("\n")[0]
    lines = [(command, outcome, count, details[command]) for (command, outcome), count in sorted(counts.items())]
    return markdown(pd.DataFrame(lines, columns=["command", "outcome", "runs", "detail of one"])) if lines else "None."
