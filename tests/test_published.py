"""Simulated peaks are those that others measured on a GPU: a sample of what benchmarks/published.py compares."""

import csv
import statistics

import pytest
from conftest import ROOT
from published import COLUMNS, operator_peaks, operators, published, simulated

from pipeline.base.units import MIB

SAMPLE = {18: 0.0001, 23: 0.002}
"""Numbers of rows, and how far their allocated bytes may be off: LoRA in float16, and QLoRA, whose loading varies."""


def committed() -> list[dict[str, str]]:
    with max((ROOT / "benchmarks").glob("published_2*.csv")).open() as file:
        return list(csv.DictReader(file))


FLOAT32_STEP = 2**-23


def test_the_peaks_of_operators_are_those_of_an_a100() -> None:
    for (kernel, x, mib), num_bytes in zip(operators(), operator_peaks(), strict=True):
        assert num_bytes / MIB == pytest.approx(mib, rel=FLOAT32_STEP), (kernel, x)


@pytest.mark.slow
def test_the_bytes_of_lora_steps_are_those_of_a_t4() -> None:
    rows = published()
    found = simulated([rows[number - 1][0] for number in SAMPLE])
    for (number, largest), one in zip(SAMPLE.items(), found, strict=True):
        for name in ("after_load", "forward", "backward", "optimizer", "allocated"):
            mib = float(rows[number - 1][1][COLUMNS[name]])
            assert getattr(one, name) / MIB == pytest.approx(mib, rel=largest), (number, name)


def test_the_numbers_of_the_evidence_are_those_of_the_table() -> None:
    evidence = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    rows = committed()
    assert len(rows) == len(published()) == 57
    for row, (_, source) in zip(rows, published(), strict=True):
        assert all(float(row[f"published_{name}_mib"]) == float(source[column]) for name, column in COLUMNS.items())
    own = [row for row in rows if row["repeats"] == "False"]
    for quantized, kind in (("False", "LoRA"), ("True", "QLoRA")):
        errors = {
            name: [abs(float(row[f"{name}_error_percent"])) for row in own if row["quantized"] == quantized]
            for name in ("allocated", "reserved")
        }
        text = ", ".join(
            f"{name} {statistics.median(values):.2f} % (worst {max(values):.1f} %)" for name, values in errors.items()
        )
        assert f"{kind}: {text}" in evidence, f"{kind}: {text}"
