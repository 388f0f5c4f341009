"""Peaks of trainings that others reported (benchmarks/published/reports.yaml), predicted with the settings they used.

    python benchmarks/reports.py        predicts all on simulated cards, into benchmarks/reports_<date>.csv and .md

A torch with CUDA, or the environment of the simulated card, is needed. The card has all the memory that a training asks
for, so that a peak is known also where it did not fit.
"""

import csv
import datetime
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rows import add_missing
from transformers import AutoConfig

from pipeline.base.units import MIB
from pipeline.config.experiment import make_experiment
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict

FOLDER = Path(__file__).parent
DATA = FOLDER / "published" / "reports.yaml"
FORMS = ("weights", "optimizer_implementation", "adapter", "adapter_targets", "task")
"""Settings that say what was trained."""
ROOM = 256 * 1024 * MIB
"""Memory of the simulated card."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One report and its prediction."""

    name: str
    source: str
    card: str
    reported_gb: float | None
    """10**9 bytes allocated at the peak; None if it ran out of memory."""
    predicted_gb: float
    predicted_reserved_mib: float
    error_percent: float | None
    fits: bool | None
    """Of a training that ran out of memory: whether it is predicted to fit."""


def main() -> None:
    """Predict the reports that the table of today does not have."""
    published = yaml.safe_load(DATA.read_text())
    by_name = {row["name"]: row for row in _with_sources(published["rows"])}
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"

    def predicted(name: str) -> Predicted:
        return _predicted(by_name[name], published["models"])

    table = FOLDER / f"reports_{date}.csv"
    add_missing(table, Predicted, by_name, predicted)
    with table.open(newline="") as file:
        found = {row["name"]: row for row in csv.DictReader(file)}
    table.with_suffix(".md").write_text("\n".join(_page(by_name, found)) + "\n")


def _page(published: dict[str, Any], found: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a table of all reports, with the settings of each that name a form of the training."""
    yield "# Reported and predicted peaks\n"
    yield "Allocated memory in GB of 10**9 bytes; settings of each row: published/reports.yaml.\n"
    yield "| report | training | form | reported GB | predicted GB | error |"
    yield "|---|---|---|---:|---:|---:|"
    for name, row in found.items():
        settings = published[name]["settings"]
        form = "; ".join(f"{each}={settings[each]}" for each in FORMS if each in settings)
        reported = f"{float(row['reported_gb']):.2f}" if row["reported_gb"] else "out of memory"
        fits = {"True": "fits: wrong", "False": "does not fit: right"}
        error = fits.get(row["fits"]) or f"{float(row['error_percent']):+.1f} %"
        yield f"| {row['source']} | {name} | {form} | {reported} | {float(row['predicted_gb']):.2f} | {error} |"


def _with_sources(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    source, found = "", []
    for row in rows:
        source = source if row["source"] == "same" else row["source"]
        found.append({**row, "source": source})
    return found


def _predicted(row: dict[str, Any], models: dict[str, Any]) -> Predicted:
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**models[row["model"]]).save_pretrained(folder)
        settings = {"accumulation_steps": 1, "eval_steps": 0, "device": "cpu", **row["settings"], "model": folder}
        experiment = make_experiment(settings, "main")
        card = replace(find_hardware(row["card"]), memory_bytes=ROOM)
        prediction = predict(experiment, card)
    allocated, reserved = prediction.peak_allocated_bytes, prediction.peak_reserved_bytes or 0
    reported = float(row["reported"]) if "reported" in row else None
    return Predicted(
        name=row["name"],
        source=row["source"],
        card=row["card"],
        reported_gb=None if reported is None else reported / 1e9,
        predicted_gb=round(allocated / 1e9, 3),
        predicted_reserved_mib=round(reserved / MIB),
        error_percent=None if reported is None else round(100 * (allocated / reported - 1), 1),
        fits=None if reported is not None else reserved <= float(row["capacity"]),
    )


if __name__ == "__main__":
    main()
