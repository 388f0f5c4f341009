"""The benchmark of the levers: runs that resume, and a page and a waterfall of their medians."""

import csv
import runpy
import subprocess
import sys
from pathlib import Path

import model_by_card
import pytest
from conftest import PNG, ROOT
from levers_page import measured, page, waterfall

from pipeline.config.given import nested
from pipeline.config.variants import EntryPoint, load_entry_point

TINY = {"model": "gpt2-nano", "device": "cpu", "sequence_length": 32, "vocabulary_size": 512, "causal_lm.width": 32}
SCRIPT = ROOT / "benchmarks" / "levers.py"
"""Whose name a module of the tests has too."""
WORDS = ["--device", "cpu", "--tiny", "--date", "2026-01-02"]


def run(*words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the benchmark on tiny settings."""
    command = [sys.executable, str(SCRIPT), *WORDS, "--folder", str(folder), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_runs_resume_and_equal_configurations_run_once(tmp_path: Path) -> None:
    words = ["--variants", "precision bf16,+ precision"]
    first = run(*words, "--repeats", "1", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    file = tmp_path / "levers_tiny_cpu_gpt2-nano_2026-01-02.csv"
    before = file.read_text()
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["variant"] for row in rows} == {"alone/plain", "alone/precision bf16"}
    for row in rows:
        assert int(row["predicted_allocated_bytes"]) == pytest.approx(int(row["peak_allocated_bytes"]), rel=0.05)
        assert len(row["losses"].split()) == 4
    assert run(*words, "--repeats", "1", folder=tmp_path).returncode == 0 and file.read_text() == before
    text = file.with_suffix(".md").read_text()
    assert text.count("| precision bf16 |") == text.count("| + precision |") == 1
    assert "- expandable segments: skipped, expandable_segments=true configures CUDA's caching allocator" in text
    assert file.with_suffix(".png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats must be 1 or more, and is 0"),
        (["--variants", "faster"], "no variant is called 'faster'; they are "),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([*WORDS, "--folder", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def entry() -> EntryPoint:
    return load_entry_point("levers", nested(TINY))


def line(repeat: int, variant: str, peak_bytes: int, seconds: float, outcome: str = "ok") -> dict[str, str]:
    """Return a line of the .csv."""
    sizes = {"predicted_allocated_bytes": str(peak_bytes), "peak_allocated_bytes": str(peak_bytes)}
    return {
        "repeat": str(repeat),
        "variant": variant,
        "outcome": outcome,
        **sizes,
        "seconds_per_step": str(seconds),
        "losses": f"{2.0 + peak_bytes / 2**30} 1.0",
    }


def test_a_lever_is_compared_with_the_plain_run_of_its_repeat(entry: EntryPoint) -> None:
    plain = [line(repeat, "alone/plain", 2**20, 1.0 + repeat) for repeat in range(3)]
    chunked = [line(repeat, "alone/loss chunked", 2**19, 1.1 * (1 + repeat)) for repeat in range(3)]
    chunked[2] = line(2, "alone/loss chunked", 2**19, 6.0)
    failed = line(0, "alone/accumulation", 2**19, 1.0, "crashed")
    runs = [*plain, *chunked, failed, line(7, "alone/gelu fused", 2**19, 1.0)]
    found = measured(entry, "alone", runs)
    assert set(found) == {"plain", "loss chunked"}  # the others failed, or lack a plain run of their repeat
    one = found["loss chunked"]
    assert (one.peak_mib, one.saved_percent, one.seconds_per_step) == (0.5, 50.0, 2.2)
    assert one.time_percent == pytest.approx((10, 10, 100))
    assert one.loss_percent == pytest.approx(100 * (2**-11) / (2 + 2**-10))
    text = page(entry, runs, {"threads": "1"}, "plot.png", 2)
    assert "- accumulation: crashed" in text and "2 runs are left: the same command continues" in text


def test_the_ladder_is_drawn_from_the_medians(entry: EntryPoint) -> None:
    names = ["alone/plain", "alone/precision bf16", "ladder/+ loss"]
    runs = [line(0, name, 2**20 >> number, 1.0 + number) for number, name in enumerate(names)]
    assert set(measured(entry, "ladder", runs)) == {"plain", "+ precision", "+ loss"}
    assert len(waterfall(entry, runs)) > len(waterfall(entry, runs[:1])) > 0


def planned(model: str, gib: int, levers: str, micro_batch_size: int | None, tokens: int | None) -> dict[str, str]:
    """Return a row of the table of models and cards."""
    row = dict.fromkeys(model_by_card.COLUMNS, "")
    row |= {"model": model, "gib": str(gib), "levers": levers}
    fits = {"micro_batch_size": str(micro_batch_size), "tokens_per_second": str(tokens), "choice": "plain"}
    return row | (fits if micro_batch_size else {})


def test_the_table_of_models_and_cards_has_both_sets_of_levers() -> None:
    rows = [
        planned("gpt2-xl", 24, "three", None, None),
        planned("gpt2-xl", 24, "all", 4, 1234),
        planned("gpt2", 24, "three", 8, 30000),
        planned("gpt2", 80, "all", 8, 90000),
    ]
    lines = model_by_card.page(rows).splitlines()
    assert "| model | 24 GiB | 80 GiB |" in lines
    assert "| gpt2 | 8: 30,000 → - | - → 8: 90,000 |" in lines
    assert "| gpt2-xl | - → 4: 1,234 | - → - |" in lines


def test_unknown_models_and_cards_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--models", "gpt5"], ["--gib", "7"]):
        assert model_by_card.main([*words, "--folder", str(tmp_path)]) == 2
        assert f"{words[1]} is not one of " in capsys.readouterr().err
