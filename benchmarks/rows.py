"""Rows of a .csv file, one for each case: an interrupted benchmark goes on with those that the file does not have."""

import csv
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case", bound=Hashable)


def after_constant(ratios: Mapping[Case, float], model_of: Callable[[Case], str]) -> dict[Case, float]:
    """Return estimated over published values, after the constant of a machine: the median ratio of all other models."""
    return {
        case: ratio / statistics.median([other for one, other in ratios.items() if model_of(one) != model_of(case)])
        for case, ratio in ratios.items()
    }


def add_missing(
    table: Path, kind: type[Any], names: Iterable[str], make: Callable[[str], Any], num_at_once: int = 1
) -> None:
    """Append a row for each name that the first column does not have, as soon as it is made.

    Args:
        table: the file; it is created if it is missing.
        kind: the dataclass of the rows, whose first field is the name.
        names: of all cases, in the order of the file.
        make: makes the row of a name.
        num_at_once: rows that are made at a time.

    """
    columns = [field.name for field in fields(kind)]
    if not table.exists():
        table.write_text(",".join(columns) + "\n")
    with table.open(newline="") as file:
        done = {row[columns[0]] for row in csv.DictReader(file)}
    left = [name for name in names if name not in done]
    with ThreadPoolExecutor(num_at_once) as pool, table.open("a", newline="") as file:
        for made in pool.map(make, left):
            row = asdict(made)
            print(*list(row.values())[:10], sep=", ", flush=True)
            csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
            file.flush()
