"""Reports take every outcome: a failed baseline, a skipped variant, a run that died at once."""

from dataclasses import replace

import pytest
from rich.console import Console
from test_metrics import result

from pipeline.contracts import Outcome
from pipeline.metrics import Row, against_baseline, summarize
from pipeline.report import accumulation, checkpointing, precision
from pipeline.report.overview import comparison_frame, notes, overview_figure, terminal_table

PNG = b"\x89PNG\r\n"
GOOD = result()
DIVERGED = replace(GOOD, outcome=Outcome.DIVERGED, detail="nan", steps=GOOD.steps[:1], finished=None)
DEAD = replace(GOOD, outcome=Outcome.OUT_OF_MEMORY, detail="no memory", steps=(), memory=None, finished=None)
RESULTS = {"ok": GOOD, "diverged": DIVERGED, "dead": DEAD, "skipped": None}
PARAMS = {"micro_batch_size": 2, "accumulation_steps": 2, "dataset_size": 100, "model": "gpt2-nano", "device": "cpu"}


def rows(*kinds: str) -> list[Row]:
    """Return the rows of a comparison; the first is the baseline."""
    found: list[Row] = []
    for number, kind in enumerate(kinds):
        outcome = RESULTS[kind]
        figures = summarize(outcome, 4, 2) if outcome else {}
        baseline = found[0].result if found else None
        if outcome and baseline:
            figures |= against_baseline(outcome, figures, baseline, dict(found[0].figures))
        found.append(
            Row(
                comparison="c",
                name=f"{kind}-{number}",
                is_baseline=number == 0,
                params={**PARAMS, "accumulation_steps": 2 + number},
                result=outcome,
                skipped=None if outcome else "not here",
                figures=figures,
            )
        )
    return found


CASES = [
    ("ok", "ok", "ok"),
    ("ok", "dead", "skipped", "diverged"),
    ("dead", "ok"),
    ("diverged", "ok"),
    ("skipped", "ok"),
    ("dead",),
]


@pytest.mark.parametrize("kinds", CASES, ids="-".join)
@pytest.mark.parametrize("report", [accumulation, checkpointing, precision])
def test_a_report_takes_every_outcome(report: object, kinds: tuple[str, ...]) -> None:
    shown = rows(*kinds)
    frames, pictures = report.tables(shown), report.figures(shown)  # type: ignore[attr-defined]
    assert all(len(frame) for frame in frames.values())
    assert all(picture.startswith(PNG) for picture in pictures.values())
    if kinds == CASES[0]:
        assert frames


@pytest.mark.parametrize("kinds", CASES, ids="-".join)
def test_the_overview_takes_every_outcome(kinds: tuple[str, ...]) -> None:
    shown = rows(*kinds)
    assert overview_figure("title", shown).startswith(PNG)
    assert list(comparison_frame(shown)["outcome"]) == [r.result.outcome if r.result else "skipped" for r in shown]
    console = Console(width=120, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(terminal_table("title", shown))
    for row in shown:
        assert row.name in capture.get()
    assert len(notes(shown)) == sum(kind != "ok" for kind in kinds)
