"""What a benchmark has measured, in a .csv file that grows by a line a run: a killed benchmark goes on from there."""

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contracts import InvalidInputError

COLUMNS = (
    "model",
    "configuration",
    "round",
    "peer",
    "outcome",
    "seconds_per_step",
    "tokens_per_second",
    "peak_allocated_mib",
    "first_mean_of_means",
    "losses",
    "seconds",
    "tokens",
    "targets",
    "detail",
    "conditions",
)


@dataclass(frozen=True)
class Journal:
    """The file, and a digest of the conditions by the name of model and configuration."""

    file: Path
    conditions: Mapping[str, str]

    @classmethod
    def open(cls, file: Path, conditions: Mapping[str, str]) -> "Journal":
        """Make or continue the file; a line that was cut off is forgotten.

        Raises:
            InvalidInputError: its folder is not writable, or it has runs under other conditions.

        """
        journal = cls(file, {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in conditions.items()})
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+") as lines:
                lines.seek(0)
                text = lines.read()
                lines.truncate(len(text[: text.rfind("\n") + 1].encode()))
                if "\n" not in text:
                    lines.write(",".join(COLUMNS) + "\n")
        except OSError as error:
            raise InvalidInputError(
                f"the results folder must be writable, and {file.parent} is not ({error.strerror}); name another: "
                "--folder results"
            ) from error
        for row in journal.rows():
            name = f"{row['model']} {row['configuration']}"
            if journal.conditions.get(name, row["conditions"]) != row["conditions"]:
                raise InvalidInputError(
                    f"runs must be measured under one set of conditions, and those of {name} in {file} had other "
                    "settings, versions or hardware; move that file away, or name another folder: --folder results"
                )
        return journal

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a run, at once."""
        digest = self.conditions[f"{row['model']} {row['configuration']}"]
        with self.file.open("a", newline="") as end:
            csv.DictWriter(end, COLUMNS, lineterminator="\n").writerow({**row, "conditions": digest})

    def rows(self) -> list[dict[str, str]]:
        """Return all runs in the order in which they ended."""
        with self.file.open(newline="") as lines:
            return list(csv.DictReader(lines))
