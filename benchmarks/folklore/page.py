"""The table of the claims, as Markdown and as CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from folklore.claim import Claim, Record, described, number
from folklore.scale import Scale
from folklore.verdict import Finding, Statement, spread
from pipeline.base.results import Outcome
from pipeline.runtime.environment import environment

SHOWN = (
    "device_name",
    "device_memory_mib",
    "driver",
    "cuda",
    "torch",
    "transformers",
    "mlflow",
    "python",
    "allocator",
    "processor",
    "cores",
    "host_memory_mib",
    "system",
    "git_commit",
    "git_changes",
)
COLUMNS = (
    "claim",
    "figure",
    "condition",
    "unit",
    "claimed",
    "median",
    "least",
    "greatest",
    "runs",
    "verdict",
    "settings",
)
HOW_TO_READ = """\
A figure of a variant against its baseline is taken from their runs of one round, which share a seed and so the weights
and the sequences; the median and the spread (least to greatest) are over the rounds. In each round all configurations
run in random order, each in a process of its own through the project's `execute`, as a child run in MLflow, and every
figure is read back from there. Memory is the peak of live tensors (`peak_allocated_mib`), time is per sample, from the
median step after the first two. Under a condition a claim holds where the median is within the range `claimed`; the
tolerance (±) is ours. What ran out of memory or over its budget is a row as any other. In the first table `measured` is
the range of the medians over all conditions; the tables below it say each condition, with its spread."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All statements, and how they came about."""

    statements: Sequence[Statement]
    records: Sequence[Record]
    """Every run that they follow from."""
    scale: Scale
    date: str
    command: str
    plot: str
    """The picture's file, beside the page."""

    def markdown(self) -> str:
        """Return the page."""
        device = torch.device(self.scale.device)
        about = {**environment(device), "threads": str(torch.get_num_threads()), "date": self.date}
        facts = [(name, about[name]) for name in (*SHOWN, "threads", "date") if name in about]
        form = "" if self.scale.name == "full" else f", {self.scale.name} form"
        lines = [
            f"# What people say of training memory, measured: {device.type}{form}, {self.date}",
            "",
            f"Written by `{self.command}`. {self.scale.note}",
            "",
            self._runs(),
            "",
            HOW_TO_READ,
            "",
            *_table(("what", "value"), facts),
            f"![What is claimed, beside what was measured]({self.plot})",
            "",
            *_table(("claim", "figure", "conditions", "claimed", "measured", "verdict"), [*self._rows()]),
        ]
        for claim, statements in groupby(self.statements, key=lambda statement: statement.claim):
            lines += _details(claim, [finding for statement in statements for finding in statement.findings])
        return "\n".join([*lines, *_misfits(self.records)])

    def csv(self) -> str:
        """Return every finding as a line, with the settings of its runs."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for statement in self.statements:
            writer.writerows(_fields(statement.claim, finding) for finding in statement.findings)
        return text.getvalue()

    def _runs(self) -> str:
        """Return how many rounds there were, and what is still missing."""
        findings = [finding for statement in self.statements for finding in statement.findings]
        counts = [len(finding.samples) for finding in findings]
        missing = sum("not run yet" in finding.reasons for finding in findings)
        note = f" {missing} of {len(findings)} figures lack runs: the same command goes on." if missing else ""
        return f"{len(self.records)} runs; rounds behind each figure: {spread(counts)}.{note}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for claim, statements in groupby(self.statements, key=lambda statement: statement.claim):
            words = f"**{claim.name}**: {claim.text}"
            for statement in statements:
                conditions = f"[{len(statement.findings)}](#{claim.name})"
                yield words, statement.what, conditions, statement.claimed, statement.measured, statement.verdict
                words = ""


def _misfits(records: Sequence[Record]) -> list[str]:
    """Return the runs that did not end well, those of the same settings together."""
    runs = Counter((described(r.params), r.outcome.value) for r in records if r.outcome is not Outcome.OK)
    details = {described(record.params): (record.detail or "").splitlines() for record in records}
    rows = [(words, outcome, str(count), *details[words][:1]) for (words, outcome), count in sorted(runs.items())]
    table = _table(("settings", "outcome", "runs", "detail of one"), rows) if rows else ["Every run did.", ""]
    return ["", "## Runs that did not fit, or did not end well", "", *table]


def _details(claim: Claim, findings: Sequence[Finding]) -> list[str]:
    heads = ("figure", "condition", "claimed", "median", "least to greatest", "runs", "verdict")
    return [
        "",
        f"## {claim.name}",
        "",
        f"*{claim.text}.*",
        "",
        *_table(heads, [_cells(finding) for finding in findings]),
    ]


def _cells(finding: Finding) -> tuple[str, ...]:
    check, samples = finding.check, finding.samples
    measured = (f"{number(finding.median)} {check.unit}", spread(samples)) if samples else ("", "")
    claimed = f"{check.claimed.words} {check.unit}"
    return check.what, check.condition, claimed, *measured, str(len(samples)), finding.verdict


def _fields(claim: Claim, finding: Finding) -> dict[str, Any]:
    check, samples = finding.check, finding.samples
    known = {"median": finding.median, "least": min(samples), "greatest": max(samples)} if samples else {}
    return {
        "claim": claim.name,
        "figure": check.what,
        "condition": check.condition,
        "unit": check.unit,
        "claimed": check.claimed.words,
        **{name: f"{value:.6g}" for name, value in known.items()},
        "runs": len(samples),
        "verdict": finding.verdict,
        "settings": json.dumps(check.runs),
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]
