"""A report: question, answer, tables and plots, as one self-contained HTML page and as Markdown."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from pipeline.report.plot import Plot, javascript
from pipeline.report.table import Table

DESCRIPTION_CHARACTERS = 8000
"""The longest description that MLflow's stores take (mlflow.utils.validation.MAX_TAG_VAL_LENGTH)."""
MORE = "\n\nThe rest is in report.html."


@dataclass(frozen=True, kw_only=True)
class Section:
    """Tables, notes and plots under one heading."""

    title: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences below the tables."""
    plots: tuple[Plot, ...] = ()
    headlines: tuple["Headline", ...] = ()
    """Its answer as figures."""
    why: tuple[str, ...] = ()
    """Sentences on why that is the answer."""
    choice: tuple[str, ...] = ()
    """The buttons that show this section, one of each row of them; it is always shown if there are none."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A figure of the answer."""

    title: str
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a job for its reader."""

    entry: str
    question: str
    answer: str
    sections: tuple[Section, ...]
    environment: Mapping[str, str]
    settings: Mapping[str, object]
    """The settings that all runs share, by dotted name."""
    headlines: tuple[Headline, ...] = ()
    """The answer as figures."""
    lead: str | None = None
    """The answer in words beside these figures; `answer` where it is None."""
    command: str | None = None
    """The command that goes on from the answer, in the job's folder."""
    command_title: str = "Run it"
    """What the command does."""
    is_repeated: bool = False
    """Whether that is the command that was given, which the terminal need not show again."""

    @property
    def plots(self) -> list[Plot]:
        """The plots of all sections."""
        return [plot for section in self.sections for plot in section.plots]

    @property
    def tables(self) -> list[Table]:
        """The tables of all sections."""
        return [table for section in self.sections for table in section.tables]

    @property
    def choices(self) -> list[list[str]]:
        """The rows of buttons that each show some of the sections."""
        chosen = [section.choice for section in self.sections if section.choice]
        return [list(dict.fromkeys(names)) for names in zip(*chosen, strict=True)]


def to_html(report: Report, running: str | None = None) -> str:
    """Return the report as one HTML page with its charts and the scripts that draw them.

    `running` says how far a job is that is not finished; the page then says so, and loads itself again.
    """
    own = (files("pipeline.report") / "page.js").read_text()
    return _template().render(report=report, running=running, vega=javascript(), own=own)


def to_markdown(report: Report) -> str:
    """Return question, answer and tables for the description of an MLflow run, within MLflow's limit of length."""
    parts = [f"**{report.question}**", report.answer]
    for section in report.sections:
        for table in section.tables:
            parts += [f"**{table.title}**", table.to_markdown(), *([table.note_on_page] if table.note_on_page else [])]
        parts += (*section.why, *section.notes)
    text = "\n\n".join(parts)
    if len(text) <= DESCRIPTION_CHARACTERS:
        return text
    return text[: DESCRIPTION_CHARACTERS - len(MORE)].rpartition("\n")[0] + MORE


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("pipeline.report") / "page.html").read_text())
