"""Predicted peaks are those that others measured on a GPU: a sample of what benchmarks/published.py compares."""

import csv
import math

import pytest
from conftest import ROOT
from operator_peaks import OperatorRun, peak_allocated_bytes
from published import COLUMNS, compare, published

from pipeline.base.units import MIB
from pipeline.prediction.cards import find_card

LORA = 18, 26, 30
"""SmolLM2 and TinyLlama in float16, scores written out: with blocks in another order 6 to 9 % less is reserved."""
QLORA = 23
"""The same model in 4 bits, 2 x 512 tokens, memory-efficient attention."""
FLOAT32_STEP = 2**-23


def committed() -> list[dict[str, str]]:
    with max((ROOT / "benchmarks").glob("published_*.csv")).open() as file:
        return list(csv.DictReader(file))


def operators() -> list[tuple[str, int, float]]:
    with (ROOT / "benchmarks" / "published" / "liger_a100.csv").open() as file:
        return [(row["kernel"], int(row["x"]), float(row["peak_allocated_mib"])) for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and peft
def test_the_bytes_of_lora_steps_are_those_of_a_t4() -> None:
    for row in compare(LORA):
        assert row.predicted == row.measured, row.run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_bytes_of_a_qlora_step_are_near_those_of_a_t4() -> None:
    [row] = compare([QLORA])
    assert row.predicted["after_load"] == row.measured["after_load"]
    for name in ("forward", "backward", "optimizer", "allocated"):
        assert abs(row.error_percent(name)) <= 0.2, name
    assert abs(row.error_percent("reserved")) <= 6


@pytest.mark.parametrize(("kernel", "x", "measured_mib"), operators())
def test_the_peak_of_an_operator_is_that_of_an_a100(kernel: str, x: int, measured_mib: float) -> None:
    predicted = peak_allocated_bytes(OperatorRun(kernel=kernel, x=x), find_card("a100")) / MIB
    assert predicted == pytest.approx(measured_mib, rel=FLOAT32_STEP)


def test_the_committed_table_has_every_published_run() -> None:
    rows = committed()
    assert len(rows) == len(published()) == 57
    for row, (_, source) in zip(rows, published(), strict=True):
        assert all(float(row[f"published_{name}_mib"]) == float(source[column]) for name, column in COLUMNS.items())


def test_the_numbers_of_the_evidence_are_those_of_the_table() -> None:
    evidence = (ROOT / "docs" / "evidence.md").read_text()
    rows = [row for row in committed() if row["repeats"] == "False"]
    lora, qlora = ([row for row in rows if (row["quantized"] == "True") == quantized] for quantized in (False, True))
    assert len(lora) == 20 and all(float(row["allocated_error_percent"]) == 0 for row in lora)
    worst = [
        max(abs(float(row[f"{name}_error_percent"])) for row in own)
        for own, name in ((lora, "reserved"), (qlora, "allocated"), (qlora, "reserved"))
    ]
    stated = [math.ceil(100 * each) / 100 for each in worst]
    assert f"LoRA allocated exact, reserved within {stated[0]} %; QLoRA {stated[1]} %, {stated[2]} % |" in evidence
