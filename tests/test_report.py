"""Reports take every outcome: a failed baseline, a skipped variant, a run that died at once."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import PNG
from rich.console import Console
from test_metrics import result

from pipeline.base.results import Outcome
from pipeline.jobs.publish import show
from pipeline.report.answers import answer
from pipeline.report.comparison import (
    ComparisonFindings,
    comparison_table,
    notes,
    overview_plots,
    overview_table,
)
from pipeline.report.findings import FILE, read_findings, report_of, to_json
from pipeline.report.other_trainings import other_trainings
from pipeline.report.page import to_html, to_markdown
from pipeline.report.plot import Plot
from pipeline.report.sections import NAMES, make_sections
from pipeline.report.table import Table
from pipeline.training.metrics import Row, against_baseline, summarize
from pipeline.training.time_differences import with_times
from pipeline.training.timing import timing_of

GOOD = result()
DIVERGED = replace(GOOD, outcome=Outcome.DIVERGED, detail="nan", steps=GOOD.steps[:1], finished=None)
DEAD = replace(GOOD, outcome=Outcome.OUT_OF_MEMORY, detail="no memory", steps=(), memory=None, finished=None)
RESULTS = {"ok": GOOD, "diverged": DIVERGED, "dead": DEAD, "skipped": None}
PARAMS = {
    "micro_batch_size": 2,
    "effective_batch_size": 4,
    "accumulation_steps": 2,
    "dataset_size": 100,
    "model": "gpt2-nano",
    "device": "cpu",
    "precision": "fp32",
    "checkpointing": "none",
}

LADDER: list[dict[str, str]] = [{}, {"precision": "bf16"}, {"precision": "bf16", "checkpointing": "every_layer"}]


def rows(*kinds: str) -> list[Row]:
    """Return the rows of a comparison; the first is the baseline."""
    found: list[Row] = []
    for number, kind in enumerate(kinds):
        outcome = RESULTS[kind]
        metrics = summarize(outcome, 4, 2) if outcome else {}
        baseline = found[0].result if found else None
        if outcome and baseline:
            metrics |= against_baseline(outcome, metrics, baseline, dict(found[0].metrics))
        timing = timing_of(outcome.steps, 2) if outcome else None
        found.append(
            Row(
                comparison="ladder",
                name=f"{kind}-{number}",
                is_baseline=number == 0,
                params={**PARAMS, "accumulation_steps": 2 + number, **LADDER[number % len(LADDER)]},
                result=outcome,
                skipped=None if outcome else "not here",
                metrics=metrics,
                timings=(timing,) if timing else (),
            )
        )
    return list(with_times(found))


def with_losses(row: Row, *losses: float, **params: object) -> Row:
    """Return a row with these losses and settings."""
    assert row.result is not None
    steps = [replace(row.result.steps[0], step=number, loss=loss) for number, loss in enumerate(losses)]
    metrics = {**row.metrics, "eval_loss": losses[-1] + 1}
    return replace(row, result=replace(row.result, steps=tuple(steps)), params={**PARAMS, **params}, metrics=metrics)


def test_another_training_is_compared_with_float32_adamw_and_called_another() -> None:
    """After the steps that both have taken; what keeps the training is not in it."""
    first, second, third = rows("ok", "ok", "ok")
    compared = [
        with_losses(first, 5.0, 4.0, 3.5, optimizer="adamw"),
        with_losses(second, 5.0, 4.5, optimizer="adamw_8bit", adamw_8bit_embeddings="8bit"),
        with_losses(third, 5.0, 4.0, 3.5, precision="bf16"),
    ]
    section = other_trainings("kinds", compared)
    assert section is not None
    [table] = section.tables
    assert not section.plots  # the baseline is the reference: the differences are below the losses
    [line] = table.frame.to_dict("records")
    assert line == {
        "variant": "ok-1",
        "steps": 2,
        "loss": 4.5,
        "difference": 0.5,
        "mean": 0.25,
        "held out": 1.0,
        "changed": "optimizer=adamw_8bit, adamw_8bit_embeddings=8bit",
    }
    assert (
        table.note is not None
        and "with other mathematics" in table.note
        and "ok-0 is AdamW on all weights" in table.note
    )
    elsewhere = other_trainings("kinds", [replace(row, is_baseline=row is compared[1]) for row in compared])
    assert elsewhere is not None and elsewhere.plots[0].to_png().startswith(PNG)
    page = to_html(report_of(ComparisonFindings(entry="x", question="?", rows=tuple(compared), environment={})))
    assert "other trainings beside AdamW on all weights in float32" in page


def test_without_float32_adamw_the_report_says_that_it_was_not_measured() -> None:
    skipped, second = rows("skipped", "ok")
    section = other_trainings("kinds", [skipped, with_losses(second, 5.0, 4.5, weights="bfloat16")])
    assert section is not None and not section.tables and not section.plots
    assert section.notes == (
        "Another training than AdamW on all weights in float32, which has not been measured here: ok-1. So no losses "
        "compare.",
    )


def test_one_training_and_other_data_have_no_such_comparison() -> None:
    assert other_trainings("kinds", rows("ok", "ok", "skipped")) is None
    first, second = rows("ok", "ok")
    other = with_losses(second, 5.0, 4.5, optimizer="sgd", model="gpt2")
    assert other_trainings("kinds", [with_losses(first, 5.0, 4.0), other]) is None


def test_what_is_to_be_said_of_a_variant_is_in_the_notes() -> None:
    [row] = rows("skipped")
    assert notes([replace(row, note="a sentence")]) == ("skipped-0: a sentence", "skipped-0: skipped, not here")


CASES = [
    ("ok", "ok", "ok"),
    ("ok", "dead", "skipped", "diverged"),
    ("dead", "ok"),
    ("diverged", "ok"),
    ("skipped", "ok"),
    ("dead",),
]


@pytest.mark.parametrize("kinds", CASES, ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_a_section_takes_every_outcome(name: str, kinds: tuple[str, ...]) -> None:
    found = make_sections([name], rows(*kinds))
    assert found or kinds != CASES[0]
    for section in found:
        assert all(len(table.frame) for table in section.tables)
        for plot in section.plots:
            assert plot.to_png().startswith(PNG)
            assert [panel.to_spec()["description"] for panel in plot.panels] == [one.title for one in plot.panels]


@pytest.mark.parametrize("kinds", CASES, ids="-".join)
def test_the_overview_takes_every_outcome(kinds: tuple[str, ...]) -> None:
    shown = rows(*kinds)
    assert all(plot.to_png().startswith(PNG) for plot in overview_plots(shown))
    outcomes = [r.result.outcome if r.result else "skipped" for r in shown]
    assert list(comparison_table(shown).frame["outcome"]) == outcomes
    console = Console(width=120, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(overview_table("title", shown).to_terminal(console.width))
    for row in shown:
        assert row.name in capture.get()
    assert len(notes(shown)) == sum(kind != "ok" for kind in kinds)
    assert answer(shown).endswith(".")


@pytest.mark.quick
@pytest.mark.matrix(2)
@pytest.mark.parametrize("kinds", CASES, ids="-".join)
def test_the_page_is_made_again_from_the_findings_alone(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Non-finite gradient norms and <markup> included."""
    shown = rows(*kinds)
    odd = [replace(row, name=f"<b>{row.name}</b>") for row in shown]
    findings = ComparisonFindings(
        entry="combined", question="What?", rows=tuple(odd), environment={"torch": "2"}, sections=NAMES
    )
    (tmp_path / FILE).write_text(to_json(findings))
    again = read_findings(tmp_path)
    assert again == findings or "nan" in repr(findings)
    page = to_html(report_of(again))
    assert page == to_html(report_of(findings))
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))
    for row in odd:
        assert row.name in to_markdown(report_of(findings))


def test_the_title_of_a_narrow_table_is_on_one_line() -> None:
    table = Table(name="largest", title="the largest micro-batch that fits", frame=pd.DataFrame({"largest": [4]}))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table.to_terminal(80))
    assert capture.get().splitlines()[0].rstrip() == table.title


def test_markdown_tables_survive_their_own_separator() -> None:
    table = Table(name="t", title="t", frame=pd.DataFrame([{"a|b": "x|y", "n": 1.5}]))
    assert table.to_markdown().splitlines() == ["| a\\|b | n |", "| --- | ---: |", "| x\\|y | 1.5 |"]


def test_square_brackets_and_dollars_are_shown_as_they_are(tmp_path: Path) -> None:
    """A crash's last lines may hold what rich or Vega would take for markup."""
    detail = "signal SIGABRT\nerror in [/usr/lib/libx.so] [enforce fail at alloc_cpu.cpp:121]"
    odd = [replace(row, name="loss $x^$", result=replace(DEAD, detail=detail)) for row in rows("dead")]
    findings = ComparisonFindings(entry="main", question="What?", rows=tuple(odd), environment={})
    console = Console(width=200, markup=False)
    with console.capture() as capture:
        show(report_of(findings), console)
    assert "[/usr/lib/libx.so] [enforce fail at alloc_cpu.cpp:121]" in capture.get()
    assert all(plot.to_png().startswith(PNG) for plot in overview_plots(odd))


def test_other_runs_are_not_said_to_have_ended_well() -> None:
    lone = [replace(row, metrics={"peak_allocated_mib": 1.0, "seconds_per_step": 1.0}) for row in rows("ok", "ok")]
    assert answer(lone).startswith("ok-0 peaks at 1.0 MiB")
    bare = [replace(row, metrics={}) for row in rows("ok", "ok")]
    assert answer(bare) == "2 of 2 runs completed; the baseline was not measured."


def test_a_mean_loss_of_zero_leaves_its_column_empty() -> None:
    still = replace(GOOD, steps=tuple(replace(step, loss=0.0) for step in GOOD.steps))
    [row] = rows("ok")
    [section] = make_sections(("smoothness",), [replace(row, result=still, metrics=summarize(still, 4, 2))])
    [line] = section.tables[0].frame.to_dict("records")
    assert line["loss std"] == 0 and pd.isna(line["loss cv"])


def test_reserved_memory_is_a_column_where_it_was_measured() -> None:
    [row] = rows("ok")
    without = {name: value for name, value in row.metrics.items() if name != "peak_reserved_mib"}
    assert "reserved MiB" not in overview_table("title", [replace(row, metrics=without)]).frame
    on_cuda = replace(row, metrics={**without, "peak_reserved_mib": 7.0})
    assert list(overview_table("title", [on_cuda]).frame["reserved MiB"]) == [7.0]


def rungs_of(plot: Plot) -> list[str]:
    """Return the labels of a waterfall's first panel, from top to bottom."""
    spec = plot.panels[0].to_spec()
    names = json.loads(spec["layer"][0]["encoding"]["y"]["axis"]["labelExpr"].removesuffix("[datum.value]"))
    assert len(names) == len(data_of(spec))
    return [" ".join(lines) for lines in names]


def data_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data of a whole chart."""
    lines: list[dict[str, Any]] = spec["data"]["values"]
    return lines


def test_a_waterfall_is_drawn_for_the_ladder_alone() -> None:
    ladder = rows("ok", "ok", "ok")
    alone = [replace(row, comparison="alone") for row in rows("ok", "ok", "ok")]
    other = replace(ladder[1], name="other", params={**ladder[0].params, "micro_batch_size": 1})
    [section] = make_sections(("waterfall",), [*alone, *ladder[:2], other, *ladder[2:]])
    [plot] = section.plots
    assert len(plot.panels) == 2
    assert rungs_of(plot) == ["ok-0", "+ precision bf16", "+ checkpointing every_layer", "together"]
    assert not make_sections(("waterfall",), alone)


def test_a_skipped_variant_of_a_ladder_leaves_its_change_to_the_next() -> None:
    shown = rows("ok", "skipped", "ok")
    last = replace(shown[2], name="both", params={**shown[2].params, "micro_batch_size": 1})
    [section] = make_sections(("waterfall",), [*shown, last])
    labels = ["ok-0", "+ checkpointing every_layer + precision bf16", "+ micro_batch_size 1", "together"]
    assert rungs_of(section.plots[0]) == labels
