"""How far predicted peaks are from published ones, which others measured on a GPU (benchmarks/published).

    python benchmarks/published.py             writes benchmarks/published_<date>.md and .csv

LoRA and QLoRA on a Tesla T4 (57 runs, 8 of them repeats), and single operators on an A100. Models,
loading and steps follow the published conditions. Two were not recorded or cannot be right, and are chosen
(published/README.md): the rules of torch are those of 2.11, and twelve weights are loaded ahead in QLoRA.
"""

import argparse
import csv
import datetime
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from lora_model import Run
from lora_trace import Peaks, replay, trace
from operator_peaks import OperatorRun, peak_allocated_bytes

from pipeline.base.units import MIB
from pipeline.prediction.cards import find_card

FOLDER = Path(__file__).parent
DATA = FOLDER / "published"
COLUMNS = {
    "after_load": "after_load_allocated_mib",
    "forward": "peak_forward_mib",
    "backward": "peak_backward_mib",
    "optimizer": "peak_optimizer_mib",
    "allocated": "peak_allocated_mib",
    "reserved": "peak_reserved_mib",
}
"""Names of the measured values and their columns in t4_lora.csv."""
VERSIONS = ("torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One published run and its prediction; all values are in MiB."""

    number: int
    run: Run
    repeats: bool
    """Whether it repeats another run."""
    predicted: dict[str, float]
    measured: dict[str, float]

    def error_percent(self, name: str) -> float:
        """Return how much more was predicted than measured."""
        return 100 * (self.predicted[name] / self.measured[name] - 1)


def published() -> list[tuple[Run, dict[str, str]]]:
    """Return the published runs with their rows."""
    return [
        (
            Run(
                series=row["series"],
                model=row["model_id"],
                attention=row["attn_impl"],
                batch_size=int(row["batch_size"]),
                sequence_length=int(row["seq_len"]),
                quantized=row["quantization"] == "nf4",
            ),
            row,
        )
        for row in _read("t4_lora.csv")
    ]


def predict(run: Run) -> Peaks:
    """Return the predicted peaks of a run."""
    return replay(trace(run, model_shape(run), find_card("t4")))


def model_shape(run: Run) -> dict[str, str]:
    """Return the published configuration of a run's model."""
    [shape] = [row for row in _read("models.csv") if row["model_id"] == run.model]
    return shape


def compare(numbers: Sequence[int] = ()) -> list[Compared]:
    """Return the published runs of these numbers, by default all, with their predictions; equal runs once."""
    rows = [(number, *row) for number, row in enumerate(published(), start=1) if not numbers or number in numbers]
    runs = list(dict.fromkeys(run for _, run, _ in rows))
    if len(runs) > (os.cpu_count() or 1):
        with ProcessPoolExecutor() as pool:
            peaks = dict(zip(runs, pool.map(predict, runs), strict=True))
    else:
        peaks = {run: predict(run) for run in runs}
    return [
        Compared(
            number=number,
            run=run,
            repeats=bool(row["repeat_of"]),
            predicted={name: num_bytes / MIB for name, num_bytes in asdict(peaks[run]).items()},
            measured={name: float(row[column]) for name, column in COLUMNS.items()},
        )
        for number, run, row in rows
    ]


def operators() -> Iterator[tuple[OperatorRun, float, float]]:
    """Yield the published runs of operators with their predicted and their published peak, in MiB."""
    for row in _read("liger_a100.csv"):
        run = OperatorRun(kernel=row["kernel"], x=int(row["x"]))
        yield run, peak_allocated_bytes(run, find_card("a100")) / MIB, float(row["peak_allocated_mib"])


def spread_mib(rows: list[Compared], model: str) -> float:
    """Return how far apart the published loads of a quantized model are, in MiB."""
    loads = [row.measured["after_load"] for row in rows if row.run.quantized and row.run.model == model]
    return max(loads) - min(loads)


def summary(rows: list[Compared]) -> Iterator[str]:
    """Yield a line for each kind of runs and each value."""
    for kind, quantized in (("LoRA", False), ("QLoRA", True)):
        own = [row for row in rows if row.run.quantized == quantized and not row.repeats]
        for name in COLUMNS:
            errors = [row.error_percent(name) for row in own]
            exact = sum(row.predicted[name] == row.measured[name] for row in own)
            yield (
                f"| {kind} | {name.replace('_', ' ')} | {len(own)} | {exact} | "
                f"{statistics.median(map(abs, errors)):.3f} % | {max(errors, key=abs):+.3f} % |"
            )


def beyond_spread_percent(rows: list[Compared]) -> float:
    """Return the worst error of QLoRA's allocated peak beyond the spread of the published loads of its model."""
    return max(
        100
        * max(0, abs(row.predicted["allocated"] - row.measured["allocated"]) - spread_mib(rows, row.run.model))
        / row.measured["allocated"]
        for row in rows
        if row.run.quantized
    )


def page(rows: list[Compared], date: str) -> str:
    """Return the table as Markdown."""
    head = ["run", "model", "attention", "batch", "weights", "allocated MiB", "published", "error"]
    head += ["reserved MiB", "published", "error", "forward", "backward", "optimizer"]
    lines = [
        f"# Predicted and published peak memory, Tesla T4, {date}",
        "",
        "Written by `python benchmarks/published.py`: LoRA and QLoRA steps that others measured on a Tesla T4, under "
        "the conditions in [published/README.md](published/README.md). Error is predicted / published - 1; the last "
        "three columns are errors of the phases' allocated peaks. With "
        + ", ".join(f"{name} {version(name)}" for name in VERSIONS)
        + ".",
        "",
        "| kind | value | runs | exact | median error | worst |",
        "|---|---|---:|---:|---:|---:|",
        *summary(rows),
        "",
        "Repeats are left out above. QLoRA's loads of one model differ by up to "
        f"{max(spread_mib(rows, row.run.model) for row in rows):.2f} MiB; beyond the spread of its model the "
        f"worst error of an allocated QLoRA peak is {beyond_spread_percent(rows):.3f} %.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * 3 + "---:|---|" + "---:|" * (len(head) - 5),
    ]
    others = [
        "",
        "Operators on an A100, forward and backward, allocated peak; published as float32.",
        "",
        "| operator | varied | predicted MiB | published | error |",
        "|---|---:|---:|---:|---:|",
    ]
    single = [
        f"| {run.kernel} | {run.x} | {predicted} | {measured} | {100 * (predicted / measured - 1):+.6f} % |"
        for run, predicted, measured in operators()
    ]
    return "\n".join([*lines, *map(_line, rows), *others, *single, ""])


def _line(row: Compared) -> str:
    run = row.run
    cells = [str(row.number), run.model.partition("/")[2], run.attention, f"{run.batch_size} x {run.sequence_length}"]
    cells += ["nf4" if run.quantized else "float16"]
    for name in ("allocated", "reserved"):
        cells += [f"{row.predicted[name]:.2f}", f"{row.measured[name]:.2f}", f"{row.error_percent(name):+.3f} %"]
    cells += [f"{row.error_percent(name):+.3f} %" for name in ("forward", "backward", "optimizer")]
    return "| " + " | ".join(cells) + " |"


def table(rows: list[Compared]) -> Iterator[dict[str, object]]:
    """Yield the rows of the CSV file."""
    for row in rows:
        values = {"run": row.number, **asdict(row.run), "repeats": row.repeats}
        for name in COLUMNS:
            values |= {f"predicted_{name}_mib": row.predicted[name], f"published_{name}_mib": row.measured[name]}
            values[f"{name}_error_percent"] = round(row.error_percent(name), 4)
        yield values


def _read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Predict all and write the table, or print some rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=int, nargs="*", help="numbers of runs, which are printed; by default all, written")
    numbers = parser.parse_args().runs
    rows = compare(numbers)
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    values = list(table(rows))
    if numbers:
        print(*values, sep="\n")
        return
    with (FOLDER / f"published_{date}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, values[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(values)
    (FOLDER / f"published_{date}.md").write_text(page(rows, date))


if __name__ == "__main__":
    main()
