"""A table for the terminal, the report's page, MLflow's description and a CSV file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.table import Table as TerminalTable
from rich.text import Text

from pipeline.base.units import in_four_digits
from pipeline.config.given import written

Form = str | Callable[[float], str]
"""How a number is written: a format string, or a function."""
LONG_CHARACTERS = 45
"""Text longer than this may be wrapped."""
GAP = 2
"""Characters between two columns in the terminal."""
MOST_ROWS = 300
"""Rows that a table shows at most, unless it says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A data frame with a title and the formats of its columns."""

    name: str
    """File name of its CSV, without suffix."""
    title: str
    frame: pd.DataFrame
    forms: Mapping[str, Form] = field(default_factory=dict)
    """How the numbers of a column are written, by its heading."""
    note: str | None = None
    """A line below the table."""
    num_in_terminal: int | None = None
    """Number of rows, from the first, that the terminal shows; None for MOST_ROWS, 0 omits the table."""
    expendable: tuple[str, ...] = ()
    """Columns that a terminal without room for all leaves out, the first one first; the CSV file has all."""
    num_on_page: int = MOST_ROWS
    """Number of rows, from the first, that the page and MLflow's description show; the CSV file has all."""

    @classmethod
    def of(cls, name: str, title: str, lines: Iterable[Mapping[Any, object]], **more: Any) -> "Table":
        """Return the table with these lines, each of which has its cells by heading."""
        return cls(name=name, title=title, frame=pd.DataFrame(list(lines)), **more)

    @cached_property
    def _filled(self) -> pd.DataFrame:
        """The columns that have a value in some row."""
        return self.frame.dropna(axis="columns", how="all") if len(self.frame) else self.frame

    @property
    def headings(self) -> list[str]:
        """The names of the columns that are shown: the CSV file has those without any value too."""
        return [str(name) for name in self._filled.columns]

    @cached_property
    def lines(self) -> list[list[str]]:
        """The cells on the page as text, row by row; a missing value is empty."""
        return self._rows(self.num_on_page)

    def _rows(self, num_rows: int) -> list[list[str]]:
        return [
            [self._written(heading, value) for heading, value in zip(self.headings, values, strict=True)]
            for values in self._filled.head(num_rows).itertuples(index=False)
        ]

    @property
    def note_on_page(self) -> str:
        """The note, and the number of rows that are only in the CSV file."""
        return self._below(len(self.lines))

    def first(self, num_rows: int) -> pd.DataFrame:
        """Return the first rows as text."""
        return pd.DataFrame(self._rows(num_rows), columns=self.headings)

    def is_numeric(self, heading: str) -> bool:
        """Whether a column holds numbers, which are aligned right and sorted by value."""
        return self.frame[heading].dtype.kind in "iuf"

    def to_terminal(self, width: int) -> TerminalTable:
        """Return the table for rich, for a terminal of so many characters."""
        shown = self._rows(MOST_ROWS if self.num_in_terminal is None else self.num_in_terminal)
        places, fits = self._places(shown, width)
        left_out = [name for place, name in enumerate(self.headings) if place not in places and name]
        without = f"More columns in {self.name}.csv: {', '.join(left_out)}." if left_out else ""
        below = "\n".join(filter(None, (self._below(len(shown)), without)))
        caption = {"caption": below, "caption_justify": "left"} if below else {}
        table = TerminalTable(
            title=self.title,
            title_justify="left",
            min_width=min(len(self.title), width),  # a title is wrapped at its table's width
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            **caption,  # type: ignore[arg-type]
        )
        for place in places:
            longest = max((len(line[place]) for line in shown), default=0)
            is_numeric = self.is_numeric(self.headings[place])
            justify: Literal["left", "right"] = "right" if is_numeric else "left"
            no_wrap = is_numeric or (fits and longest <= LONG_CHARACTERS)  # words may be cut in two, no number
            table.add_column(self._narrow(self.headings[place]), justify=justify, no_wrap=no_wrap, vertical="top")
        for line in shown:
            table.add_row(*(Text(line[place]) for place in places))
        return table

    def _places(self, shown: Sequence[Sequence[str]], width: int) -> tuple[list[int], bool]:
        """Return the numbers of the columns for which there is room, and whether there is room for all of these."""
        places = list(range(len(self.headings)))
        widths = [
            GAP + max(map(len, (*self._narrow(heading).split("\n"), *(line[place] for line in shown))))
            for place, heading in enumerate(self.headings)
        ]
        alike = [  # which go after the expendable ones
            name
            for place, name in enumerate(self.headings)
            if len(shown) > 1 and len({line[place] for line in shown}) == 1
        ]
        for name in (*self.expendable, *alike, None):
            if sum(widths[place] for place in places) <= width:
                return places, True
            places = [place for place in places if self.headings[place] != name]
        return places, False

    def _narrow(self, heading: str) -> str:
        lines = heading.replace("_", "_\n")
        return lines.replace(" ", "\n").replace("-", "-\n") if self.is_numeric(heading) else lines

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rules = ["---:" if self.is_numeric(heading) else "---" for heading in self.headings]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in (self.headings, *self.lines)]
        return "\n".join(f"| {' | '.join(row)} |" for row in (escaped[0], rules, *escaped[1:]))

    def _below(self, num_shown: int) -> str:
        """Return the note, and how many rows are not among the first `num_shown`."""
        num_more = len(self.frame) - num_shown
        return " ".join(
            line for line in (self.note, f"{num_more} more in {self.name}.csv." if num_more else "") if line
        )

    def _written(self, heading: str, value: object) -> str:
        if pd.isna(value):  # type: ignore[call-overload]
            return ""
        if isinstance(value, float):
            form = self.forms.get(heading, in_four_digits)
            text = form.format(value) if isinstance(form, str) else form(value)
            return text if text.strip("+-0.") else text.lstrip("+-")  # zero has no sign
        return written(value)


def file_alone(name: str, title: str, lines: Iterable[Mapping[Any, object]]) -> Table:
    """Return a table that neither the terminal nor the page shows: it is a CSV file."""
    return Table.of(name, title, lines, num_in_terminal=0, num_on_page=0)
