"""How far estimated seconds of an optimizer step are from measured ones: published on a T4, and whole spaces on CPUs.

    python benchmarks/step_time.py             traces all, writes benchmarks/step_time_<date>.csv and .md
    python benchmarks/step_time.py --fit FILE  estimates again from the work in a .csv, and writes both files again
    python benchmarks/step_time.py --spaces FILE  traces the published runs alone, and takes the spaces from a .csv

The published runs are those of benchmarks/published.py without repeats; the spaces are those of the search's replays
(search_table_*cpu_*.csv). Each time is estimated three times: from rates alone (NVIDIA's data sheet; on a CPU what
measured_rates() says of this machine, which need not be the one of the table), as `fitproof plan` does, and with costs
fitted to the runs of all other groups. A group is a model of the published runs, a checkpointing policy of a space.
The last table has the costs fitted to all published runs, as rates.
"""

import argparse
import csv
import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from published import published, simulated
from replay.table import conditions, count_work, is_whole, read
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from pipeline.base.contracts import Hardware
from pipeline.memory.device import find_device, hardware_of
from pipeline.planning.rates import cost_prior, rate_costs
from pipeline.planning.step_time import CALLS, KINDS, Array, CostPrior, amounts, seconds_by_kind
from pipeline.prediction.cards import find_hardware

FOLDER = Path(__file__).parent
T4 = "Tesla T4, LoRA and QLoRA"
ESTIMATES = {"rates": "rates alone", "plan": "as `plan`", "fitted": "fitted to the other groups"}

OWN_COLUMNS = ("micro_batch_size", "checkpointing")
"""Dimensions that the name of a configuration does not repeat: its group is the policy."""
LAUNCH_STARTS = (1, 3, 10)
"""Multiples of the expected cost of a launch from which it is fitted: where it sets no time it has no slope."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured configuration; K kinds of work."""

    subject: str
    """What was measured together: the published runs, or a space."""
    group: str
    name: str
    num_passes: int
    pass_K: Array
    update_K: Array
    seconds: float

    @property
    def row(self) -> dict[str, object]:
        """The columns of the CSV file."""
        work = {
            f"{part}_{kind}": f"{amount:.15g}"
            for part, amounts_K in (("pass", self.pass_K), ("update", self.update_K))
            for kind, amount in zip(KINDS, amounts_K, strict=True)
        }
        names = {"subject": self.subject, "group": self.group, "name": self.name, "num_passes": self.num_passes}
        return {**names, **work, "measured_seconds": self.seconds}


def case_of(row: Mapping[str, str]) -> Case:
    """Return the configuration of a row of the CSV file."""
    work = (np.array([float(row.get(f"{part}_{kind}", 0)) for kind in KINDS]) for part in ("pass", "update"))
    pass_K, update_K = work
    return Case(
        subject=row["subject"],
        group=row["group"],
        name=row["name"],
        num_passes=int(row["num_passes"]),
        pass_K=pass_K,
        update_K=update_K,
        seconds=float(row["measured_seconds"]),
    )


def published_cases(numbers: Sequence[int] = ()) -> Iterator[Case]:
    """Yield the published runs that repeat no other, by default all, each traced for one step."""
    wanted = [
        (number, run, row)
        for number, (run, row) in enumerate(published(), start=1)
        if not row["repeat_of"] and (not numbers or number in numbers)
    ]
    for (number, run, row), found in zip(wanted, simulated([run for _, run, _ in wanted]), strict=True):
        weights = "nf4" if run.quantized else "float16"
        yield Case(
            subject=T4,
            group=run.model.partition("/")[2],
            name=f"run {number}: {run.attention}, {run.batch_size} x {run.sequence_length}, {weights}",
            num_passes=1,
            pass_K=amounts(found.pass_work),
            update_K=amounts(found.update_work),
            seconds=float(row["step_seconds"]),
        )


def space_cases(file: Path) -> Iterator[Case]:
    """Yield the configurations of a measured space, with the work that their traces count."""
    about = conditions(file)
    count_work(file)
    for entry in read(file):
        candidate = entry.candidate
        others = [f"{name} {value}" for name, value in candidate.choice.items() if name not in OWN_COLUMNS]
        yield Case(
            subject=f"{about['model']} on {about['processor']}{', default space' * is_whole(file)}",
            group=str(candidate.choice["checkpointing"]),
            name=", ".join([f"micro-batch {candidate.micro_batch_size}", *others]),
            num_passes=candidate.num_passes,
            pass_K=amounts(candidate.pass_work),
            update_K=amounts(candidate.update_work),
            seconds=entry.seconds,
        )


def estimate(cases: Sequence[Case], log_costs_K: Array, *, is_queued: bool) -> Array:
    """Return the seconds of each configuration with these costs: N."""
    passes_NK, updates_NK = np.stack([one.pass_K for one in cases]), np.stack([one.update_K for one in cases])
    num_passes_N = np.array([one.num_passes for one in cases])
    passes_N, updates_N = (
        seconds_by_kind(amounts_NK, np.exp(log_costs_K), is_queued=is_queued).sum(axis=1)
        for amounts_NK in (passes_NK, updates_NK)
    )
    seconds_N: Array = num_passes_N * passes_N + updates_N
    return seconds_N


def fitted(cases: Sequence[Case], prior: CostPrior) -> Array:
    """Return the most probable logarithms of the costs, K: least squares of the logarithms of the times."""
    measured = np.log([one.seconds for one in cases])

    def residuals(log_costs_K: Array) -> Array:
        of_times = (np.log(estimate(cases, log_costs_K, is_queued=prior.is_queued)) - measured) / prior.residual
        return np.concatenate([of_times, (log_costs_K - prior.log_costs_K) / prior.deviations_K])

    launch = np.eye(len(KINDS))[KINDS.index("launch")]
    fits = [least_squares(residuals, prior.log_costs_K + np.log(factor) * launch) for factor in LAUNCH_STARTS]
    best: Array = min(fits, key=lambda one: float(one.cost)).x
    return best


def estimates(cases: Sequence[Case], hardware: Hardware) -> dict[str, Array]:
    """Return the seconds of each configuration by each of ESTIMATES."""
    prior = cost_prior(hardware)
    of = partial(estimate, is_queued=prior.is_queued)
    left_out = np.zeros(len(cases))
    for group in dict.fromkeys(one.group for one in cases):
        own = [number for number, one in enumerate(cases) if one.group == group]
        costs = fitted([one for one in cases if one.group != group], prior)
        left_out[own] = of([cases[number] for number in own], costs)
    return {
        "rates": of(cases, np.log(rate_costs(hardware))),
        "plan": of(cases, prior.log_costs_K),
        "fitted": left_out,
    }


def errors(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    """Return the median and the worst error of an estimate in percent, and the rank correlation with the measured."""
    estimated, measured = ([float(row[f"{which}_seconds"]) for row in rows] for which in (name, "measured"))
    percent = [100 * (one / other - 1) for one, other in zip(estimated, measured, strict=True)]
    return statistics.median(map(abs, percent)), max(percent, key=abs), float(spearmanr(estimated, measured).statistic)


def hardware_for(subject: str) -> Hardware:
    """Return the T4, or this machine's CPU for a space that was measured on any CPU."""
    return find_hardware("t4") if subject == T4 else hardware_of(find_device("cpu"))


def table(cases: Sequence[Case]) -> Iterator[dict[str, object]]:
    """Yield the rows of the CSV file."""
    for subject in dict.fromkeys(one.subject for one in cases):
        own = [one for one in cases if one.subject == subject]
        columns = estimates(own, hardware_for(subject))
        for number, one in enumerate(own):
            yield {**one.row, **{f"{name}_seconds": f"{column[number]:.6g}" for name, column in columns.items()}}


def costs(cases: Sequence[Case], hardware: Hardware) -> Iterator[tuple[str, str, str]]:
    """Yield each kind of work that the configurations have, its cost as `plan` expects it, and the fitted one."""
    prior = cost_prior(hardware)
    has_K = np.any([one.pass_K + one.update_K > 0 for one in cases], axis=0)
    for kind, has, *logs in zip(KINDS, has_K, prior.log_costs_K, fitted(cases, prior), strict=True):
        unit = "GB/s" if kind.endswith("_bytes") else "GFLOP/s"
        words = [
            f"{1e6 * np.exp(one):.1f} µs" if kind in CALLS else f"{1e-9 / np.exp(one):,.0f} {unit}" for one in logs
        ]
        if has:
            yield kind, *words


def page(rows: Sequence[Mapping[str, Any]], date: str) -> str:
    """Return the table as Markdown."""
    lines = [
        f"# Estimated and measured seconds of an optimizer step, {date}",
        "",
        *(__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip().splitlines(),
        "",
        "| measured | configurations | costs | median error | worst | rank correlation |",
        "|---|---:|---|---:|---:|---:|",
    ]
    subjects = list(dict.fromkeys(str(row["subject"]) for row in rows))
    for subject in subjects:
        own = [row for row in rows if row["subject"] == subject]
        for name, words in ESTIMATES.items():
            median, worst, rank = errors(own, name)
            lines.append(f"| {subject} | {len(own)} | {words} | {median:.1f} % | {worst:+.0f} % | {rank:.3f} |")
    lines += ["", "| measured | group | configurations | median error, fitted to the others | worst |"]
    lines += ["|---|---|---:|---:|---:|"]
    for subject, group in dict.fromkeys((str(row["subject"]), str(row["group"])) for row in rows):
        own = [row for row in rows if (row["subject"], row["group"]) == (subject, group)]
        median, worst, _ = errors(own, "fitted")
        lines.append(f"| {subject} | {group} | {len(own)} | {median:.1f} % | {worst:+.0f} % |")
    lines += ["", f"| kind of work, {T4} | expected | fitted |", "|---|---:|---:|"]
    on_t4 = [case_of(row) for row in rows if row["subject"] == T4]
    lines += [f"| {' | '.join(words)} |" for words in costs(on_t4, hardware_for(T4))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Trace or read the work, estimate, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, help="a .csv whose work is read instead of traced")
    parser.add_argument("--spaces", type=Path, help="a .csv whose rows of the spaces are taken as they are")
    given = parser.parse_args()
    kept: list[dict[str, Any]] = []
    if given.fit:
        with given.fit.open() as file:
            cases = [case_of(row) for row in csv.DictReader(file)]
    elif given.spaces:
        with given.spaces.open() as file:
            kept = [row for row in csv.DictReader(file) if row["subject"] != T4]
        cases = [*published_cases()]
    else:
        spaces = map(space_cases, sorted(FOLDER.glob("search_table_*cpu_*.csv")))
        cases = [*published_cases(), *(one for space in spaces for one in space)]
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    output = given.fit or FOLDER / f"step_time_{date}.csv"
    rows = [*table(cases), *kept]
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    output.with_suffix(".md").write_text(page(rows, date))


if __name__ == "__main__":
    main()
