"""How far predicted peaks are from those of torch's real CUDA allocator, on simulated cards: no GPU is needed.

    python benchmarks/cuda_without_gpu.py                     all configurations and budgets; writes a page and two .csv
    python benchmarks/cuda_without_gpu.py --fine-tuning       adapters and 8-bit AdamW; writes a page and a .csv
    python benchmarks/cuda_without_gpu.py --sample 12         some configurations, printed
    python benchmarks/cuda_without_gpu.py --rows 't4.*fp16'   those whose names contain a regular expression, printed
    python benchmarks/cuda_without_gpu.py --explain 'h200, gpt2, .*'   aligns the allocations of the first such row

It needs .venv-cuda (make .venv-cuda/installed; pipeline/simulation/README.md says what is real on a simulated card).
Every configuration is predicted, then trained for three optimizer steps in a process of its own. A row that is in
today's .csv is not repeated, unless the code that it depends on has changed.
"""

import argparse
import csv
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import distributions, version
from itertools import groupby
from pathlib import Path
from typing import Any

from simulated_cases import CONFIGURATIONS, Case, budget_cases, cases, chosen, fine_tuning_cases
from simulated_page import page, summary

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda_without_gpu"))
from cards import PYTHON, environment_of  # noqa: E402

PATHS = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
"""Where a simulated card's process finds pipeline/ and tests/recordings.py."""
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
RUN_CODE = (
    "base/contracts.py",
    "base/sequences.py",
    "base/technique.py",
    "data",
    "models",
    "techniques",
    "training/loop.py",
    "training/step.py",
)
"""Files and folders of pipeline/ that decide what a run allocates."""
CARD_CODE = (*sorted((ROOT / "pipeline" / "simulation" / "library").iterdir()), FOLDER / "simulated_training.py")
"""The simulated card, and how a run on it begins."""
PREDICTION_CODE = ("base", "config", "memory", "models", "prediction", "techniques", "training")
"""Files and folders of pipeline/ that decide what is predicted."""
QUANTITIES = ("allocated", "reserved")
Row = dict[str, str]


class SimulatedCard:
    """A process that predicts and runs configurations on one card, with one configuration of its allocator."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, **task: Any) -> dict[str, Any]:
        """Return the answer to a task of simulated_run.py.

        Raises:
            RuntimeError: the process ended, or the task failed.

        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the process of the simulated card ended"}
        if "error" in reply:
            raise RuntimeError(f"{task}: {reply['error']}")
        return reply


@contextmanager
def simulated_card(card: str, *, expandable_segments: bool) -> Iterator[SimulatedCard]:
    """Start the process of a card, and end it afterwards."""
    base = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    variables = {**base, **environment_of(card, base=base)}
    variables |= EXPANDABLE if expandable_segments else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, configuration in CONFIGURATIONS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(configuration))
        command = [str(PYTHON), str(FOLDER / "simulated_run.py"), folder]
        with subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield SimulatedCard(process)
            assert process.stdin is not None
            process.stdin.close()


def compared(case: Case, card: SimulatedCard, old: Row) -> Row:
    """Return the row of a configuration, predicted first; a side whose code has not changed is that of the old row."""
    row = {"name": case.name, "card": case.card, "shape": case.shape, **codes(case)}
    guess = old if old.get("prediction_code") == row["prediction_code"] else card.ask(kind="predict", **asdict(case))
    truth = old if old.get("run_code") == row["run_code"] else card.ask(kind="measure", **asdict(case))
    row["outcome"] = truth["outcome"]
    for name in QUANTITIES:
        sides = {f"predicted_{name}_bytes": guess, f"measured_{name}_bytes": truth}
        row |= {column: str(side[column]) for column, side in sides.items()}
        row[f"{name}_error_percent"] = _error(*(row[column] for column in sides)) if row["outcome"] == "ok" else ""
    return row


def budgeted(case: Case, card: SimulatedCard, old: Row) -> Row:
    """Return the predicted and the real smallest budget of a configuration."""
    row = {"name": case.name, "card": case.card, **codes(case)}
    guess = card.ask(kind="predict_budget", **asdict(case))["bytes"]
    if old.get("run_code") == row["run_code"]:
        truth = old["measured_budget_bytes"]
    else:
        truth = card.ask(kind="measure_budget", start_bytes=guess, **asdict(case))["bytes"]
    row |= {"predicted_budget_bytes": str(guess), "measured_budget_bytes": str(truth)}
    return row | {"error_percent": _error(*list(row.values())[-2:])}


def _error(predicted_bytes: str, measured_bytes: str) -> str:
    return f"{100 * (int(predicted_bytes) / int(measured_bytes) - 1):.5f}"


def codes(case: Case) -> Row:
    """Return a digest of a configuration with the code that its run depends on, and one with the prediction's."""
    run, prediction = ([ROOT / "pipeline" / part for part in parts] for parts in (RUN_CODE, PREDICTION_CODE))
    return {"run_code": digest(case, [*run, *CARD_CODE]), "prediction_code": digest(case, prediction)}


@lru_cache
def versions() -> tuple[str, str]:
    """Return the versions of torch in .venv-cuda and of transformers."""
    folders = map(str, PYTHON.parents[1].glob("lib/python*/site-packages"))
    return next(iter(distributions(name="torch", path=list(folders)))).version, version("transformers")


def digest(case: Case, paths: list[Path]) -> str:
    """Return a digest of a configuration, of the versions, and of the code in these files and folders."""
    found = hashlib.sha256(repr((case.name, CONFIGURATIONS.get(case.shape), versions())).encode())
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


def read(file: Path) -> dict[str, Row]:
    """Return the rows of a .csv by their names; none without the file."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        return {row["name"]: row for row in csv.DictReader(lines)}


def write(file: Path, rows: list[Row]) -> None:
    """Write rows as .csv."""
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run_all(wanted: list[Case], work: Any, kept: dict[str, Row], file: Path | None = None) -> list[Row]:
    """Return a row for each configuration, and write all rows into a file after each one that is new."""
    ordered = sorted(wanted, key=lambda case: (case.card, case.expandable_segments))
    for (name, expandable), group in groupby(ordered, key=lambda case: (case.card, case.expandable_segments)):
        missing = [case for case in group if not codes(case).items() <= kept.get(case.name, {}).items()]
        if not missing:
            continue
        with simulated_card(name, expandable_segments=expandable) as card:
            for case in missing:
                try:
                    kept[case.name] = row = work(case, card, kept.get(case.name, {}))
                except RuntimeError as error:
                    print(error, flush=True)
                    continue
                print({key: value for key, value in row.items() if key == "name" or "error" in key}, flush=True)
                if file is not None:
                    write(file, [kept[case.name] for case in wanted if case.name in kept])
    return [kept[case.name] for case in wanted if case.name in kept]


def explain(case: Case) -> None:
    """Print where the predicted and the real allocations of a configuration differ."""
    print(case.name)
    with simulated_card(case.card, expandable_segments=case.expandable_segments) as card:
        print("\n".join(card.ask(kind="explain", **asdict(case))["lines"]))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="", help="a regular expression that the names of configurations contain")
    parser.add_argument("--sample", type=int, help="number of configurations, evenly spaced")
    parser.add_argument("--explain", metavar="ROWS", help="align the allocations of the first such configuration")
    parser.add_argument("--fine-tuning", action="store_true", help="configurations of fine-tuning, and no budgets")
    parser.add_argument("--budgets", action="store_true", help="the smallest budgets of these rows, not their peaks")
    parser.add_argument("--fresh", action="store_true", help="repeat rows that are in the .csv")
    asked = parser.parse_args()
    peaks, budgets = list(fine_tuning_cases() if asked.fine_tuning else cases()), list(budget_cases())
    if asked.explain:
        explain(chosen(peaks, asked.explain, 1)[0])
        return
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    files = [FOLDER / f"cuda_without_gpu_{part}{date}.csv" for part in ("fine_tuning_" * asked.fine_tuning, "budgets_")]
    kept = [{} if asked.fresh else read(file) for file in files]
    if asked.budgets:
        print("\n".join(summary([], run_all(chosen(budgets, asked.rows, asked.sample), budgeted, kept[1]))))
    elif asked.rows or asked.sample:
        print("\n".join(summary(run_all(chosen(peaks, asked.rows, asked.sample), compared, kept[0]), [])))
    else:
        rows = run_all(peaks, compared, kept[0], files[0])
        tables = rows, [] if asked.fine_tuning else run_all(budgets, budgeted, kept[1], files[1])
        print("\n".join(summary(*tables)))
        with simulated_card("h200", expandable_segments=False) as card:
            files[0].with_suffix(".md").write_text(page(*tables, card.ask(kind="about"), date))


if __name__ == "__main__":
    main()
