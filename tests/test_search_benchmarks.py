"""The table of a whole space and the replay of samplers on it: measured once, resumed, and reported completely."""

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import search_contenders
import search_replay
import search_replay_parallel
import search_table
from conftest import ROOT
from exit_code import UNFINISHED
from replay.parallel import replay
from replay.table import budgets, read

BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in a process of its own, which takes seconds to load what this one has loaded."""
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "FITPROOF_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / script), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    words = ["--tiny", "--date", "2026-01-02", "--folder", str(folder)]
    assert search_table.main([*words, "--repeats", "1"]) == 0
    before = (folder / "search_table_tiny_cpu_gpt2-nano_2026-01-02.csv").read_text()
    assert search_table.main([*words, "--repeats", "2"]) == 0
    file = folder / "search_table_tiny_cpu_gpt2-nano_2026-01-02.csv"
    assert file.read_text().startswith(before)
    return file


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_configuration_is_measured_as_often_as_asked_for(table: Path) -> None:
    rows = rows_of(table)
    choices = {(row["micro_batch_size"], row["checkpointing"], row["precision"]) for row in rows}
    assert len(choices) == 4 and len(rows) == 8
    for row in rows:
        assert int(row["predicted_peak_bytes"]) == pytest.approx(int(row["peak_bytes"]), rel=0.015)
        assert len(row["seconds_of_steps"].split()) == 4
    assert json.loads(table.with_suffix(".json").read_text())["model"] == "gpt2-nano"


@pytest.mark.slow
def test_every_sampler_is_replayed_and_told(table: Path) -> None:
    done = run("search_replay.py", str(table), "--seeds", "2", cache=table.parent / "cache")
    assert done.returncode == 0, done.stderr
    page = table.with_name("search_replay_tiny_cpu_gpt2-nano_2026-01-02.md").read_text()
    assert search_replay.main([str(table), "--seeds", "2"]) == 0
    assert page == table.with_name("search_replay_tiny_cpu_gpt2-nano_2026-01-02.md").read_text()
    for sampler in ("predictive", "tpe", "gp", "random", "brute", "nsga2", "doubling, fp32, checkpointed"):
        assert f"| {sampler} | 2 |" in page
    found = rows_of(table.with_name("search_replay_tiny_cpu_gpt2-nano_2026-01-02.csv"))
    assert {row["over_budget"] for row in found if row["sampler"] == "predictive"} == {"0"}


def test_those_that_may_be_the_fastest_are_measured_more_often(table: Path, tmp_path: Path) -> None:
    for file in (table, table.with_suffix(".json")):
        (tmp_path / file.name).write_text(file.read_text())
    copy = tmp_path / table.name
    assert search_contenders.main([str(copy), "--repeats", "1"]) == 0
    further = tmp_path / table.name.replace("search_table", "search_contenders")
    before = further.read_text()
    assert search_contenders.main([str(copy), "--repeats", "2"]) == 0
    assert further.read_text().startswith(before)
    counts = Counter(row["micro_batch_size"] + row["checkpointing"] for row in rows_of(further))
    assert set(counts.values()) == {2} and 1 <= len(counts) <= 4
    entries = read(copy)
    names = [f"{one.candidate.choice['micro_batch_size']}{one.candidate.choice['checkpointing']}" for one in entries]
    assert [len(one.runs) for one in entries] == [4 if name in counts else 2 for name in names]
    once = read(copy, has_further_runs=False)
    assert {len(one.runs) for one in once} == {2}
    fastest = min(once, key=lambda one: one.fastest).candidate.choice
    assert f"{fastest['micro_batch_size']}{fastest['checkpointing']}" in counts


def test_a_table_of_another_machine_is_not_continued(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (table, table.with_suffix(".json")):
        (tmp_path / file.name).write_text(file.read_text())
    other = tmp_path / table.name
    other.write_text(other.read_text().replace(rows_of(table)[0]["conditions"], "of another"))
    words = ["--tiny", "--date", "2026-01-02", "--folder", str(tmp_path)]
    assert search_table.main(words) == 2
    assert "had other settings, versions or hardware; move that file away" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:7"], "device cuda:7 needs a CUDA GPU"),
        (["--folder", "/proc/results"], "the results folder must be writable"),
        (["--model", "gpt5"], "no model is called 'gpt5'"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    assert search_table.main(["--tiny", "--folder", str(folder), *words]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(("seed", "share"), [(0, 0.33), (1, 0.6)])
def test_a_search_of_one_worker_is_the_committed_one(seed: int, share: float) -> None:
    """Nothing runs when its trials are chosen, and so they do not depend on how running ones count."""
    file = BENCHMARKS / "search_table_cpu_gpt2-nano_2026-11-21.csv"
    [budget] = budgets(read(file), [share])
    one = replay(file, budget, workers=1, seed=seed)
    key = {"sampler": "predictive", "budget_bytes": str(budget), "seed": str(seed)}
    [row] = [row for row in rows_of(Path(str(file).replace("table", "replay"))) if key.items() <= row.items()]
    assert (one.trials, str(one.seconds_to_near), one.over_budget) == (int(row["trials"]), row["seconds_to_near"], 0)
    assert (one.seconds, one.bound) == pytest.approx((float(row["seconds"]), float(row["bound"])), rel=1e-4)


def test_searches_of_several_workers_are_replayed_and_resumed(table: Path) -> None:
    words = [str(table), "--seeds", "2", "--workers", "1", "4", "--date", "2026-01-02"]
    assert search_replay_parallel.main([*words, "--minutes", "1e-9"]) == UNFINISHED
    output = table.with_name("search_replay_parallel_2026-01-02.csv")
    assert not output.with_suffix(".md").exists()
    before = output.read_text()
    assert search_replay_parallel.main(words) == 0
    assert output.read_text().startswith(before)
    page, rows = output.with_suffix(".md").read_text(), rows_of(output)
    keys = {(row["budget_bytes"], row["workers"], row["seed"]) for row in rows}
    assert len(keys) == len(rows) == len({row["budget_bytes"] for row in rows}) * 2 * 2
    assert page.count("| 1 | 2 |") == page.count("| 4 | 2 |") == len(rows) / 4
    assert search_replay_parallel.main([*words[:-2], "--workers", "0"]) == 2
