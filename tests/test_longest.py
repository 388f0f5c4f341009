"""The longest sequences that fit: what is found fits, the next length does not, and the corpus need not be as long."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from project import SMALL, Project
from test_prediction import CPU

import fitproof
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.config.given import merged, nested
from pipeline.planning.longest import MULTIPLE, largest_fitting
from pipeline.planning.plan import PlanFindings
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction
from pipeline.report.findings import read_findings, report_of
from pipeline.report.page import to_html

SPACE = {"checkpointing": ["none", "every_layer"], "loss_kernel": ["full", "chunked"]}
SHARED: dict[str, Any] = {**TINY, "space": SPACE, "effective_batch_size": 4, "micro_batch_size": 2}
del SHARED["sequence_length"], SHARED["device"]


@dataclass(frozen=True)
class MadeUp:
    """A prediction of so many bytes."""

    peak_bytes: int

    def fits(self, budget_bytes: int) -> bool:
        return self.peak_bytes <= budget_bytes


@given(
    lengths=st.lists(st.integers(1, 10_000), min_size=1, max_size=700, unique=True).map(sorted),
    budget=st.integers(0, 2 * 10**8),
    fixed=st.integers(0, 10**8),
    squared=st.booleans(),
)
def test_the_length_that_is_found_is_the_longest_that_fits(
    lengths: list[int], budget: int, fixed: int, squared: bool
) -> None:
    asked = []

    def predicted(length: int) -> Prediction:
        asked.append(length)
        return cast(Prediction, MadeUp(fixed + (length**2 if squared else 10_000 * length)))

    found, at, next_peak_bytes = largest_fitting(lengths, predicted, budget)
    fitting = [length for length in lengths if predicted(length).fits(budget)]
    num_asked = len(asked) - len(lengths)
    assert found == (fitting[-1] if fitting else lengths[0]) and at == predicted(found)
    if 0 < len(fitting) < len(lengths):
        assert next_peak_bytes == predicted(lengths[len(fitting)]).peak_bytes
    else:
        assert next_peak_bytes is None
    assert num_asked <= 2 + 2 * len(lengths).bit_length()


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("card", ["cpu", "rtx4090"])
def test_the_ends_of_what_is_found_are_predictions_of_a_run(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a corpus that has sequences of that length."""
    target = CPU if card == "cpu" else find_hardware(card)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    budget_mib = 2 if card == "cpu" else 24
    shared = {**SHARED, "adapter": "lora"}
    findings = fitproof.longest(**shared, gpu=card, budget=f"{budget_mib}MiB")
    [found] = findings.cards
    assert found.lengths_up_to == 256 and len(found.rows) == 4
    inside = [row for row in found.rows if row.next_peak_bytes]
    assert inside, [(row.choice, row.peak_bytes) for row in found.rows]
    run = {name: value for name, value in shared.items() if name != "space"}
    for row in inside:
        longest = row.choice["sequence_length"]
        assert longest % MULTIPLE == 0
        for length, peak, fits in ((longest, row.peak_bytes, True), (longest + MULTIPLE, row.next_peak_bytes, False)):
            choice = {**nested(dict(row.choice)), "device": "cpu", "sequence_length": length}
            prediction = predict(make_experiment(merged(run, choice), "main"), target)
            assert (prediction.peak_bytes, prediction.fits(budget_mib * MIB)) == (peak, fits)
    fitting = [row for row in found.rows if row.fits]
    best = max(fitting, key=lambda row: (row.choice["sequence_length"], row.tokens_per_second))
    assert found.recommended is best


def test_lengths_beyond_those_of_the_corpus_are_tried(tmp_path: Any) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one two three four five " * 400)
    settings = {**SHARED, "corpus": "text_files", "text_files": {"path": str(text)}, "model": "smollm2-135m"}
    settings |= {"causal_lm": {"num_layers": 2}, "space": {"checkpointing": ["every_layer"]}, "loss_kernel": "chunked"}
    [card] = fitproof.longest(**settings, gpu="h100").cards
    [row] = card.rows
    assert row.choice["sequence_length"] == 8192 and row.next_peak_bytes is None and row.tokens == 4 * 8192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": {"sequence_length": [64]}}, "sequence_length=auto finds the length .* leave one of them out"),
        ({"gpu": "h900"}, "no card is called 'h900'"),
        ({"space": {"precision": ["bf16"]}, "gpu": "t4"}, "precision=bf16|bf16 needs compute capability"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        fitproof.longest(**{**SHARED, "gpu": "rtx4090", **changes})


@pytest.mark.parametrize("entry", ["main", "search", "finetune"])
def test_a_run_needs_a_number(entry: str) -> None:
    with pytest.raises(
        InvalidInputError, match="plan --sequence_length auto shows the longest that fits, and is 'auto'"
    ):
        make_experiment({**TINY, "sequence_length": "auto"}, entry)


def test_the_command_reports_a_table_of_the_card(tmp_path: Any) -> None:
    project = Project.copy(tmp_path)
    given = {**SMALL, "gpu": "t4", "effective_batch_size": "4", "sequence_length": "auto", "budget": "24MiB"}
    given |= {"model": "gpt2-nano"}
    said = project.succeed("plan", {name: value for name, value in given.items() if name != "device"})
    assert re.search(r"On Tesla T4 \d of 8 configurations .* fit 24 MiB; sequences of up to \d+ tokens do", said)
    [folder] = project.folder.glob("runs/*-plan-*")
    findings = read_findings(folder)
    assert isinstance(findings, PlanFindings)
    rows = pd.read_csv(folder / "plan_tesla_t4.csv")
    assert len(rows) == len(findings.cards[0].rows) and {"sequence_length", "at the next MiB"} <= {*rows.columns}
    assert set(rows["micro-batch"]) == {1}
    assert rows["sequence_length"].is_monotonic_decreasing
    page = to_html(report_of(findings))
    assert "The next length was predicted too" in page and "longest sequences" in page


def test_findings_of_an_earlier_version_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "findings.json").write_text('{"kind": "LongestFindings", "cards": []}')
    with pytest.raises(InvalidInputError, match="for a new one run its command again"):
        read_findings(tmp_path)
