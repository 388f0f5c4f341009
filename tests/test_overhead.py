"""The overhead against a bare PyTorch loop, and the modules that are imported at the start."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny

from pipeline.base.results import MemoryUse, StepRecord
from pipeline.training.loop import train


def test_the_bare_loop_takes_the_same_steps_in_the_same_memory() -> None:
    experiment = tiny(num_steps=7)
    received: list[Any] = []
    train(experiment, experiment.prepare(), received.append)
    run = runpy.run_path(str(ROOT / "benchmarks" / "bare.py"))["run"]
    assert run(experiment, metered=False)["losses"] == [m.loss for m in received if isinstance(m, StepRecord)]
    peak = next(message.peak_allocated_bytes for message in received if isinstance(message, MemoryUse))
    bare_peak = run(experiment, metered=True)["peak_allocated_bytes"]
    assert peak / bare_peak <= 1.001, f"{peak} bytes, and {bare_peak} in the bare loop"


@pytest.mark.slow
def test_the_overhead_is_measured_in_pairs_of_runs(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "overhead.py"
    words = ["--device", "cpu", "--tiny", "--pairs", "2", "--num_steps", "6", "--starts", "1"]
    subprocess.run([sys.executable, script, *words, "--folder", tmp_path], check=True)
    (page,) = tmp_path.glob("overhead_cpu_*.md")
    cells = {row[1].strip(): row for row in (line.split("|") for line in page.read_text().splitlines()) if len(row) > 3}
    assert re.fullmatch(r"\d\.\d{4}", cells["seconds per step, median of a run"][3].strip())
    assert float(cells["peak allocated, MiB"][3]) <= 1.001
    assert float(cells["command starts"][3]) < float(cells["first step done"][3]) < float(cells["end"][3])


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("words", "late"),
    [
        (
            "from pipeline.cli import settings_of; settings_of('main'), settings_of('search')",
            {"mlflow", "optuna", "altair", "vl_convert", "pandas", "transformers", "scipy", "sqlalchemy", "jinja2"},
        ),
        (
            "import pipeline.jobs.comparison",
            {"optuna", "altair", "vl_convert", "transformers", "pipeline.report.table"},
        ),
        (
            "from pipeline.cli import parse, settings_of; import pipeline.jobs.simulate, pipeline.jobs.check\n"
            "settings_of('simulate')(**parse('simulate', ['--gpu', 't4', '--', 'python', 'train.py']))",
            {"torch", "mlflow", "transformers", "pandas", "altair"},
        ),
        ("import pipeline.jobs.profiling", {"optuna", "altair", "vl_convert", "transformers", "pipeline.report.table"}),
        (
            "from pipeline.config.experiment import make_experiment; make_experiment({'device': 'cpu'}, 'main')",
            {"transformers.modeling_utils"},
        ),
    ],
)
def test_modules_are_not_imported_before_they_are_needed(words: str, late: set[str]) -> None:
    code = f"{words}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not late & set(done.stdout.split())
