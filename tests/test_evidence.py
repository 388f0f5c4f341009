"""make evidence: pieces in order, each until it is complete or the time is over, and what the tables compare."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import evidence
import prediction_gpu
import pytest
import torch
from conftest import ROOT
from evidence import PIECES, Piece
from exit_code import UNFINISHED
from prediction_gpu import error_percent

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
SCRIPT = """
import json, sys, time
from pathlib import Path
name, folder, behaviour, *_ = sys.argv[1:]
with (Path(folder) / "calls").open("a") as calls:
    calls.write(name + "\\n")
runs = Path(folder) / (name + ".runs")
done = int(runs.read_text()) if runs.exists() else 0
if behaviour == "waits":
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(130)
if behaviour == "fails":
    sys.exit(1)
runs.write_text(str(done + 1))
sys.exit(75 if behaviour == "twice" and not done else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a script for pieces, on a machine with a GPU."""
    (tmp_path / "piece.py").write_text(SCRIPT.replace("\\\\n", "\\n"))
    monkeypatch.setattr(evidence, "_device", lambda: torch.device("cpu"))
    return tmp_path


def test_a_piece_waits_for_the_one_whose_output_it_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces(monkeypatch, folder, table="twice", replay="once")
    table, replay = evidence.PIECES
    monkeypatch.setattr(evidence, "PIECES", (table, replace(replay, after="table")))
    assert call(folder) == UNFINISHED and calls(folder) == ["table"]
    assert "replay: left (needs table, which is not complete)" in capfd.readouterr().out
    assert call(folder) == 0 and calls(folder) == ["table", "table", "replay"]


def pieces(monkeypatch: pytest.MonkeyPatch, folder: Path, **behaviours: str) -> None:
    script = str(folder / "piece.py")
    chosen = [
        Piece(name, f"{script} {name} {folder} {behaviour}", "", (f"{name}_{{date}}.md",))
        for name, behaviour in behaviours.items()
    ]
    monkeypatch.setattr(evidence, "PIECES", tuple(chosen))


def call(folder: Path, *words: str) -> int:
    return evidence.main(["--folder", str(folder), "--work", str(folder / "work"), *words])


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split()


def test_pieces_run_in_their_order_and_go_on_where_they_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces(monkeypatch, folder, first="once", second="twice", third="once")
    assert call(folder) == UNFINISHED
    assert calls(folder) == ["first", "second", "third"]
    out, err = capfd.readouterr()
    date = json.loads((folder / "work" / "state.json").read_text())["date"]
    assert f"first: complete, in {folder}: first_{date}.md" in out
    assert "second: left (goes on where it stopped)" in out and "the same command goes on with what is left (1)" in err
    assert call(folder) == 0
    assert calls(folder) == ["first", "second", "third", "second"]
    assert call(folder) == 0 and len(calls(folder)) == 4


def test_a_piece_that_fails_does_not_keep_the_others_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces(monkeypatch, folder, bad="fails", good="once")
    assert call(folder) == UNFINISHED
    out = capfd.readouterr().out
    assert "bad: left (failed with exit code 1)" in out and "good: complete" in out


def test_a_piece_that_does_not_end_is_interrupted_and_the_rest_has_no_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces(monkeypatch, folder, slow="waits", later="once")
    monkeypatch.setattr(evidence, "SECONDS_TO_END", 3)
    monkeypatch.setattr(evidence, "SECONDS_TO_STOP", 2)
    start = time.monotonic()
    assert call(folder, "--minutes", "0.1") == UNFINISHED
    assert time.monotonic() - start < 30
    out = capfd.readouterr().out
    assert "slow: left (goes on where it stopped)" in out and "later: left (no time left)" in out
    assert calls(folder) == ["slow"]


def test_a_piece_without_its_packages_says_which(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "PIECES", (Piece("one", "one.py", "", (), ("no_such_package",)),))
    assert call(folder) == UNFINISHED
    assert "one: left (needs no_such_package, which this Python does not have)" in capfd.readouterr().out


def test_evidence_of_another_card_is_not_continued(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces(monkeypatch, folder, one="once")
    assert call(folder) == 0
    monkeypatch.setattr(evidence, "device_name", lambda device: "NVIDIA L4")
    assert call(folder) == 2
    assert "name another folder: --work runs/evidence_2" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes must be more than 0, and is 0"),
        (
            ["--pieces", "claim"],
            "no piece is called 'claim'; the pieces are prediction, context, workspaces, claims, levers, peers, search",
        ),
        (["--work", "/proc/work"], "the working folder must be writable, and /proc/work is not"),
    ],
)
def test_bad_input_is_answered_before_anything_runs(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(folder, *words) == 2
    assert message in capsys.readouterr().err
    assert not list(folder.glob("*.md"))


@NO_GPU
def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path) == 2
    error = capsys.readouterr().err
    assert f"evidence is measured on a GPU, and torch {torch.__version__} sees none here; run it on a machine" in error
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_the_piece_too(tmp_path: Path) -> None:
    code = f"""
import sys, torch
sys.path[:0] = [{str(ROOT / "benchmarks")!r}, {str(ROOT)!r}]
import evidence
evidence._device = lambda: torch.device("cpu")
evidence.PIECES = (evidence.Piece("slow", "{tmp_path}/piece.py slow {tmp_path} waits", "", ()),)
sys.exit(evidence.main(["--folder", {str(tmp_path)!r}, "--work", {str(tmp_path / "work")!r}]))
"""
    (tmp_path / "piece.py").write_text(SCRIPT.replace("\\\\n", "\\n"))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        while process.poll() is None and not (tmp_path / "calls").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "slow: left (not begun)" in out


@NO_GPU
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_the_command_of_a_piece_is_understood(
    piece: Piece, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its benchmark exists and takes the words; on a CPU it goes no further than the device, or has no table."""
    values: dict[str, Any] = {"folder": tmp_path, "work": tmp_path, "date": "2026-01-02", "tiny": "", "model": "gpt2"}
    [_, script, *words] = piece.command(values, 60.0)
    monkeypatch.syspath_prepend(str(Path(script).parent))
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert "needs a CUDA GPU, and this machine has 0" in said or "the table must exist" in said


@pytest.mark.parametrize(("outcome", "expected"), [("ok", 100.0), ("over_budget", 100.0), ("out_of_memory", None)])
def test_only_completed_runs_are_compared_with_their_prediction(outcome: str, expected: float | None) -> None:
    row: dict[str, Any] = {
        "predicted": {"peak_allocated_bytes": 20},
        "measured": {"peak_allocated_bytes": 10, "outcome": outcome},
    }
    assert error_percent(row, "allocated") == expected
    assert error_percent({"predicted": row["predicted"]}, "allocated") is None


def test_predictions_are_on_disk_before_the_first_run_and_runs_go_on_where_they_stopped(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--tiny", "--sample", "2", "--date", "2026-01-02", "--folder", str(tmp_path)]
    assert prediction_gpu.main([*words, "--minutes", "1e-9"]) == UNFINISHED
    file = tmp_path / "prediction_tiny_cpu_2026-01-02.json"
    predicted = [row["predicted"] for row in json.loads(file.read_text())["rows"]]
    assert len(predicted) == 2 and file.with_suffix(".md").read_text().count("not run yet") == 2
    assert prediction_gpu.main(words) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["predicted"] for row in rows] == predicted
    assert max(abs(error_percent(row, "allocated") or 100) for row in rows) < 1
    before = file.read_text()
    assert prediction_gpu.main(words) == 0 and file.read_text() == before


def test_predictions_of_other_conditions_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prediction_tiny_cpu_2026-01-02.json").write_text(
        json.dumps({"conditions": {"torch": "1"}, "rows": []})
    )
    words = ["--device", "cpu", "--tiny", "--sample", "1", "--date", "2026-01-02", "--folder", str(tmp_path)]
    assert prediction_gpu.main(words) == 2
    assert "had other settings, versions or hardware; move that file away" in capsys.readouterr().err
