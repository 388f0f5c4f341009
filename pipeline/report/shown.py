"""What Python's API returns: findings that show themselves in three lines, and in a notebook as the answer's table."""

import textwrap
from dataclasses import dataclass, fields, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipeline.planning.plan import PlanFindings
from pipeline.prediction.commands.simulation import Simulation
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import Findings, report_of
from pipeline.report.page import Report
from pipeline.report.profile import ProfilingFindings
from pipeline.report.simulations import SimulationComparison
from pipeline.report.table import Table
from pipeline.searching.results import SearchFindings

if TYPE_CHECKING:
    import pandas as pd

CHARACTERS = 200
"""Of the answer in the text of a result."""
NUM_ROWS = 10
"""Rows of the table in a notebook."""


class Shown:
    """Findings that show themselves."""

    table: ClassVar[str | None] = None
    """The name of the table of the answer; None: the first one of the report."""

    @classmethod
    def of(cls, findings: Any) -> Self:
        """Return the findings as a result of the API."""
        return cls(**{field.name: getattr(findings, field.name) for field in fields(findings)})

    @property
    def answer(self) -> str:
        """The answer in words."""
        return self._report.lead or self._report.answer

    def to_frame(self) -> "pd.DataFrame":
        """Return the table of the answer: a row for each configuration, card, trial or process; none if it has none."""
        import pandas as pd

        return pd.DataFrame() if self._table is None else self._table.frame.copy()

    def __repr__(self) -> str:
        """Return three lines: the question, the answer, and what to go on with."""
        table = self._table
        rest = "no rows in to_frame()" if table is None else f"{len(table.frame)} rows in to_frame(): {table.title}"
        answer = textwrap.shorten(self.answer, CHARACTERS, placeholder=" ...")
        return f"{self._report.question}\n{answer}\n{rest}"

    def _repr_html_(self) -> str:
        """Return the answer and its table for a notebook."""
        answer, table = f"<p><b>{escape(self.answer)}</b></p>", self._table
        if table is None:
            return answer
        below = escape(table.note or "")
        return (
            f"{answer}{table.first(NUM_ROWS).to_html(index=False, border=0)}"
            f"<p>{below} {len(table.frame)} rows in to_frame().</p>"
        )

    @cached_property
    def _report(self) -> Report:
        findings: Findings = self  # type: ignore[assignment]
        return report_of(findings)

    @property
    def _table(self) -> Table | None:
        tables = self._report.tables
        return next((table for table in tables if table.name == self.table), next(iter(tables), None))


class Plan(Shown, PlanFindings):
    """The predicted memory and time of configurations on cards."""


class Searched(Shown, SearchFindings):
    """The fastest configuration that fits, and how sure that is."""

    table: ClassVar[str | None] = "ranking"


class Simulated(Shown, Simulation):
    """What a training needs of a card."""


class Profiled(Shown, ProfilingFindings):
    """Where the memory and the time of a configuration are."""

    table: ClassVar[str | None] = "categories"


class Compared(Shown, ComparisonFindings):
    """Runs side by side, with what each saves and costs against the baseline."""


class ComparedSimulations(Shown, SimulationComparison):
    """Simulations side by side: how their memory differs, and at which source lines."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Finetuned(Shown):
    """The kinds of fine-tuning that fit, compared, and the search of one of them."""

    kinds: Compared
    """A short training of each kind."""
    kind: str | None
    """The kind that was searched; None if none fits."""
    searched: Searched | None
    """The fastest configuration of that kind; None if nothing was measured."""

    @cached_property
    def _report(self) -> Report:
        of_kinds = self.kinds._report
        if self.searched is None:
            return of_kinds
        return replace(of_kinds, answer=f"{self.kind} was searched: {self.searched.answer} {of_kinds.answer}")
