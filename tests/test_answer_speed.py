"""One answer has one speed, that of all of its runs, in every place; and what limits its bound is said."""

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pages import BASELINE, BEST, TOKENS, search_findings

from pipeline.cli import parse
from pipeline.jobs.answer_values import answer_of
from pipeline.report.configurations import configurations_of
from pipeline.report.page import to_html, to_markdown
from pipeline.report.search import NOISY, answer, ranking_table, runs_table, search_report
from pipeline.report.trial_plots import fastest_so_far
from pipeline.searching.certificate import Certificate
from pipeline.searching.results import SearchFindings
from pipeline.searching.trials import Trial, best_speed
from pipeline.training.timing import mean_speed

NOISE = "the noise of this machine: two runs differ by about 9.9 %"
SPEEDS = st.lists(st.floats(500, 5000), max_size=2)


@st.composite
def findings(draw: st.DrawFn) -> SearchFindings:
    """Return a search whose answer and whose baseline have several runs of any speeds."""
    found = search_findings()
    rows, extra = list(found.rows), []
    for choice, role in ((BEST, "answer"), (BASELINE, "plain")):
        first = next(row for row in rows if row.choice == choice)
        for speed in draw(SPEEDS):
            metrics = {**first.metrics, "tokens_per_second": speed, "seconds_per_step": TOKENS / speed}
            rows.append(replace(first, number=len(rows), metrics=metrics))
        extra += [
            Trial(
                number=n,
                source=role,
                choice=choice,
                outcome="ok",
                fits=True,
                metrics={"tokens_per_second": speed, "peak_allocated_mib": 7.0},
            )
            for n, speed in enumerate(draw(SPEEDS))
        ]
    return replace(found, rows=tuple(rows), extra=tuple(extra))


def speeds_of(found: SearchFindings, choice: object) -> list[float]:
    """Return the speed of each run of a configuration."""
    return [one.tokens_per_second or 0.0 for one in (*found.rows, *found.extra) if one.choice == choice]


@settings(max_examples=8, derandomize=True)
@given(findings())
def test_the_answer_has_one_speed_in_every_place(found: SearchFindings) -> None:
    speed, baseline = mean_speed(speeds_of(found, BEST)), mean_speed(speeds_of(found, BASELINE))
    best, metrics, report = found.best, answer_of(found)[0], search_report(found)
    assert best is not None and best.tokens_per_second == pytest.approx(speed)
    assert metrics["tokens_per_second"] == pytest.approx(speed)
    assert metrics["speedup"] == found.speedup == pytest.approx(speed / baseline)
    assert metrics["seconds_per_step"] == pytest.approx(TOKENS / speed)
    assert f"trains {speed:,.0f} tokens/s, {speed / baseline:.2f} x the baseline" in report.answer
    assert report.headlines[1].value == f"{speed / baseline:.2f} x baseline"
    assert report.headlines[1].detail.startswith(f"{speed:,.0f} tokens/s; baseline: {baseline:,.0f} by ")
    counted = [one.tokens_per_second or 0.0 for one in found.runs if one.choice == BEST and found.is_counted(one)]
    least, most = min(counted), max(counted)
    is_noisy = most > (1 + NOISY) * least
    assert (f"the answer's runs: {least:,.0f} to {most:,.0f}" in report.headlines[1].detail) is is_noisy
    is_noisy = max(speeds_of(found, BEST)) > (1 + NOISY) * min(speeds_of(found, BEST))
    assert "Speeds are noisy" in report.answer or "the noise of this machine" in report.answer or not is_noisy
    [point] = [one for one in configurations_of(found) if one.choice == BEST]
    assert point.speed == pytest.approx(speed) and f"{speed:,.0f} tokens/s" in point.about
    shown = set(re.findall(r"[\d,]+ tokens/s", to_markdown(report)))
    assert shown == {f"{speed:,.0f} tokens/s"}


@settings(max_examples=8, derandomize=True)
@given(findings())
def test_the_line_of_a_configuration_and_its_runs_agree(found: SearchFindings) -> None:
    every, ranking = runs_table(found).frame, ranking_table(found).frame
    for choice, role in ((BEST, "answer"), (BASELINE, "baseline")):
        own = every[every["micro_batch_size"] == choice["micro_batch_size"]]
        [line] = ranking[ranking["micro-batch"] == choice["micro_batch_size"]].to_dict("records")
        assert sorted(own["tokens_per_second"]) == pytest.approx(sorted(speeds_of(found, choice)))
        assert line["runs"] == len(own) and line[""] == role
        assert line["tokens/s"] == pytest.approx(mean_speed(list(own["tokens_per_second"][own["counts"]])))
    assert set(every["run"]) == {one.name for one in found.extra} | {f"trial {row.number + 1}" for row in found.rows}


@settings(max_examples=8, derandomize=True)
@given(findings())
def test_the_line_of_the_trials_is_the_fastest_speed_of_those_that_count_so_far(found: SearchFindings) -> None:
    ordered = sorted(found.rows, key=lambda row: row.number)
    counted = [[one for one in ordered[:number] if found.is_counted(one)] for number in range(1, len(ordered) + 1)]
    assert fastest_so_far(ordered, found) == [best_speed(rows) for rows in counted]


def limited(**changes: Any) -> SearchFindings:
    """Return a search that was started with settings and whose bound is 8 %."""
    found = search_findings()
    assert isinstance(found.certificate, Certificate)
    certificate = replace(found.certificate, bound=0.08, noise=0.07, **changes)
    given = {"budget": "100MiB", "space": '{"micro_batch_size": [1, 2]}', "causal_lm.num_layers": "2"}
    return replace(found, certificate=certificate, given=given, num_trials=3)


@pytest.mark.parametrize(
    ("found", "limit", "change"),
    [
        (limited(remaining_improvement=0.06), "the number of trials", {"num_trials": "6"}),
        (limited(remaining_improvement=0.0), NOISE, {"num_trials": "6", "gap": "0.003"}),
        (replace(limited(remaining_improvement=0.06), num_trials=9), "the number of trials", {}),
        (replace(limited(remaining_improvement=0.0), num_trials=9), NOISE, {"gap": "0.003"}),
    ],
)
def test_what_limits_the_bound_is_said_with_the_command_that_continues(
    found: SearchFindings, limit: str, change: dict[str, str]
) -> None:
    text, report = answer(found), search_report(found)
    assert "At most 8 % slower than the best possible (95 % confidence): " in text
    assert f"The bound is limited by {limit}" in text
    [command] = re.findall(r"continue this search: `(.*)`\.", text)
    program, entry, *words = shlex.split(command)
    assert (program, entry) == ("fitproof", "search")
    given = parse("search", words)
    assert given.pop("causal_lm") == {"num_layers": "2"}
    assert given == {"budget": "100MiB", "space": {"micro_batch_size": [1, 2]}, **change}
    assert command in to_markdown(report) and limit in (report.lead or "")
    assert limit in to_html(report).replace("\N{NO-BREAK SPACE}", " ")


def test_nothing_is_said_of_a_limit_where_the_bound_is_the_gap() -> None:
    found = search_findings()
    assert found.certificate is not None
    assert "limited" not in answer(replace(found, certificate=replace(found.certificate, bound=0.009)))
