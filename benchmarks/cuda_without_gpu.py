"""How far predicted peaks are from those of torch's real CUDA allocator, on simulated cards: no GPU is needed.

    python benchmarks/cuda_without_gpu.py                     all configurations and budgets; writes a page and two .csv
    python benchmarks/cuda_without_gpu.py --sample 12         some configurations, printed
    python benchmarks/cuda_without_gpu.py --rows 't4.*fp16'   those whose names contain a regular expression, printed
    python benchmarks/cuda_without_gpu.py --explain 'h200, gpt2, .*'   aligns the allocations of the first such row

It needs .venv-cuda (make .venv-cuda/installed; tests/cuda_without_gpu/README.md says what is real on a simulated card).
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
from itertools import groupby
from pathlib import Path
from typing import Any

from simulated_cases import CONFIGURATIONS, Case, budget_cases, cases, chosen
from simulated_page import page, summary

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
sys.path.insert(0, str(ROOT / "tests" / "cuda_without_gpu"))
from cards import environment_of  # noqa: E402

PYTHON = ROOT / ".venv-cuda" / "bin" / "python"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
RUN_CODE = ("base", "config", "data", "models", "runtime", "techniques", "training", "memory/device.py")
"""Files and folders of pipeline/ that a real run depends on."""
PREDICTION_CODE = ("base", "config", "memory", "models", "prediction", "techniques", "training")
"""Those that a prediction depends on."""
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
    variables = {**os.environ, **environment_of(card), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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
    """Return the row of a configuration; the real run is that of the old row if its code has not changed."""
    same_run = old.get("run_code") == digest(case, RUN_CODE)
    reply = card.ask(kind="compare", settings=case.settings, measure=not same_run)
    row = {"name": case.name, "card": case.card, "shape": case.shape}
    measured = reply["measured"] or {f"peak_{name}_bytes": old[f"measured_{name}_bytes"] for name in QUANTITIES}
    row["outcome"] = reply["measured"]["outcome"] if reply["measured"] else old["outcome"]
    for name in QUANTITIES:
        guess, truth = reply["predicted"][f"peak_{name}_bytes"], int(measured[f"peak_{name}_bytes"])
        row |= {f"predicted_{name}_bytes": guess, f"measured_{name}_bytes": str(truth)}
        row[f"{name}_error_percent"] = f"{100 * (guess / truth - 1):.5f}" if row["outcome"] == "ok" else ""
    return row | {"run_code": digest(case, RUN_CODE), "prediction_code": digest(case, PREDICTION_CODE)}


def budgeted(case: Case, card: SimulatedCard, old: Row) -> Row:
    """Return the predicted and the real smallest budget of a configuration."""
    same_run = old.get("run_code") == digest(case, RUN_CODE)
    known = int(old["measured_budget_bytes"]) if same_run else None
    reply = card.ask(kind="budget", settings=case.settings, measured_bytes=known)
    guess, truth = reply["predicted"], reply["measured"]
    row = {"name": case.name, "card": case.card, "predicted_budget_bytes": guess, "measured_budget_bytes": truth}
    row["error_percent"] = f"{100 * (guess / truth - 1):.5f}"
    return row | {"run_code": digest(case, RUN_CODE), "prediction_code": digest(case, PREDICTION_CODE)}


def digest(case: Case, parts: tuple[str, ...]) -> str:
    """Return a digest of a configuration and of the code in these files and folders of pipeline/."""
    found = hashlib.sha256(repr((case.name, CONFIGURATIONS.get(case.shape))).encode())
    for part in parts:
        path = ROOT / "pipeline" / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


def up_to_date(case: Case, row: Row) -> bool:
    """Whether a row was made by the present code."""
    codes = {"run_code": RUN_CODE, "prediction_code": PREDICTION_CODE}
    return all(row.get(name) == digest(case, parts) for name, parts in codes.items())


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


def run_all(wanted: list[Case], work: Any, kept: dict[str, Row], file: Path | None) -> list[Row]:
    """Return a row for each configuration, and write all rows into a file after each one that is new."""
    ordered = sorted(wanted, key=lambda case: (case.card, case.expandable_segments))
    for (name, expandable), group in groupby(ordered, key=lambda case: (case.card, case.expandable_segments)):
        missing = [case for case in group if not up_to_date(case, kept.get(case.name, {}))]
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
        print("\n".join(card.ask(kind="explain", settings=case.settings)["lines"]))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="", help="a regular expression that the names of configurations contain")
    parser.add_argument("--sample", type=int, help="number of configurations, evenly spaced")
    parser.add_argument("--explain", metavar="ROWS", help="align the allocations of the first such configuration")
    parser.add_argument("--budgets", action="store_true", help="only smallest budgets")
    parser.add_argument("--fresh", action="store_true", help="repeat rows that are in the .csv")
    asked = parser.parse_args()
    if asked.explain:
        return explain(chosen(cases(), asked.explain, 1)[0])
    partial = bool(asked.rows or asked.sample)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    files = [FOLDER / f"cuda_without_gpu_{part}{date}.csv" for part in ("", "budgets_")]
    works = [(compared, list(cases())), (budgeted, list(budget_cases()))]
    tables: list[list[Row]] = []
    for file, (work, all_cases) in zip(files, works, strict=True):
        skipped = work is compared and asked.budgets or work is budgeted and partial and not asked.budgets
        wanted = [] if skipped else chosen(all_cases, asked.rows, asked.sample)
        kept = {} if asked.fresh else read(file)
        tables.append(list(kept.values()) if skipped else run_all(wanted, work, kept, None if partial else file))
    print("\n".join(summary(*tables)))
    if not partial:
        with simulated_card("h200", expandable_segments=False) as card:
            files[0].with_suffix(".md").write_text(page(*tables, card.ask(kind="about"), date))


if __name__ == "__main__":
    main()
