"""The runs of a benchmark in a .csv file, one row for each, so that an interrupted benchmark resumes."""

import csv
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.base.errors import InvalidInputError

CONDITIONS = "conditions"
"""Column of a digest of the conditions of a run that its own columns do not state."""


@dataclass(frozen=True)
class Journal:
    """The file; `conditions` has the conditions of the runs, by their values in the columns `subject`."""

    file: Path
    columns: Sequence[str]
    subject: Sequence[str]
    conditions: Mapping[str, str]

    @classmethod
    def open(cls, file: Path, columns: Sequence[str], subject: Sequence[str], conditions: Mapping[str, str]) -> Self:
        """Create the file or continue it; an incomplete last line is removed.

        Raises:
            InvalidInputError: its folder is not writable, or it has runs under other conditions.

        """
        digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in conditions.items()}
        journal = cls(file, (*columns, CONDITIONS), subject, digests)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+") as lines:
                lines.seek(0)
                text = lines.read()
                lines.truncate(len(text[: text.rfind("\n") + 1].encode()))
                if "\n" not in text:
                    lines.write(",".join(journal.columns) + "\n")
        except OSError as error:
            raise InvalidInputError(
                f"the results folder must be writable, and {file.parent} is not ({error.strerror}); name another: "
                "--folder results"
            ) from error
        for row in journal.rows():
            name = journal._subject_of(row)
            if digests.get(name, row.get(CONDITIONS)) != row.get(CONDITIONS):
                raise InvalidInputError(
                    f"runs must be measured under one set of conditions, and those of {name or 'all'} in {file} had "
                    "other settings, versions or hardware; move that file away, or name another folder: --folder "
                    "results"
                )
        return journal

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a run, at once."""
        digest = self.conditions[self._subject_of(row)]
        with self.file.open("a", newline="") as end:
            csv.DictWriter(end, self.columns, lineterminator="\n").writerow({**row, CONDITIONS: digest})

    def rows(self) -> list[dict[str, str]]:
        """Return all runs in the order in which they ended."""
        with self.file.open(newline="") as lines:
            return list(csv.DictReader(lines))

    def _subject_of(self, row: Mapping[str, Any]) -> str:
        return " ".join(str(row[name]) for name in self.subject)
