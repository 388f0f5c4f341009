"""A report: question, answer, tables and plots, as one self-contained HTML page and as Markdown."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from pipeline.report.glossary import terms_in
from pipeline.report.plot import Plot, javascript
from pipeline.report.table import Table

DESCRIPTION_CHARACTERS = 8000
"""The longest description that MLflow's stores take (mlflow.utils.validation.MAX_TAG_VAL_LENGTH)."""
MORE = "\n\nThe rest is in report.html."
PAGE = "report.html"
UNSENT = "unsent.json"
"""The file of what has not been sent to MLflow, which goes away."""
HANDOVER = "handover"
"""The folder of files that train the answer of a search with other frameworks."""
OWN_UI = "http://127.0.0.1:5000"
"""Where `mlflow ui` and `make ui` serve."""
UNIT = re.compile(r"(?<=\d) (?=(?:[MG]iB|m?s|%|x|tokens/s)(?!\w))|(?<=±) ")
"""The space between a number and its unit or sign."""
EXPONENT = re.compile(r"(?<=\de-)(?=\d)")
"""The place behind the minus of an exponent, where a line would end."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a measurement says of memory or time, and the settings to change."""

    text: str
    evidence: str
    """The measurement that supports it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings to change, with their new values; none if none helps."""
    command: str | None = None
    """The command that tries them, which the report adds."""

    @property
    def change(self) -> str:
        """The settings with their values, as text."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


@dataclass(frozen=True, kw_only=True)
class Section:
    """Tables, notes and plots under one heading."""

    title: str
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences below the tables."""
    left_out: tuple[str, ...] = ()
    """Sentences on what is not in them, below the others; a terminal shows the first."""
    plots: tuple[Plot, ...] = ()
    headlines: tuple["Headline", ...] = ()
    """Its answer as figures."""
    why: tuple[str, ...] = ()
    """Sentences on why that is the answer."""
    suggestions: tuple[Advice, ...] = ()
    choice: tuple[str, ...] = ()
    """The buttons that show this section, one of each row of them; it is always shown if there are none."""

    def on_page_alone(self) -> "Section":
        """Return the section with tables that the terminal does not show."""
        return replace(self, tables=tuple(replace(table, num_in_terminal=0) for table in self.tables))


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A figure of the answer."""

    title: str
    value: str
    detail: str
    copied: str | None = None
    """What its button copies; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where what a page shows is kept: its job's folder, and the run in MLflow."""

    folder: Path
    uri: str
    """The tracking store, without a password."""
    experiment_id: str
    run_id: str

    @property
    def files(self) -> list[str]:
        """The names of the files beside the page."""
        return sorted(one.name for one in self.folder.iterdir() if one.is_file() and one.name not in (PAGE, UNSENT))

    @property
    def handover(self) -> str | None:
        """The name of the folder of files that train the answer elsewhere; None if there is none beside the page."""
        return HANDOVER if (self.folder / HANDOVER).is_dir() else None

    @property
    def address(self) -> str:
        """The run in MLflow's UI: that of the store if it is a server, else of one on this machine."""
        server = OWN_UI if self.ui_command else self.uri.rstrip("/")
        return f"{server}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def ui_command(self) -> str | None:
        """The command that serves the UI on this machine; None if the store is a server."""
        return None if self.uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"


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
    commands: tuple[tuple[str, str], ...] = ()
    """What goes on from the answer, in the job's folder: what each command does, and its line."""
    is_repeated: bool = False
    """Whether the first is the command that was given, which the terminal need not show again."""

    @property
    def subject(self) -> str:
        """What is trained, with the length of its sequences; empty where runs differ in them."""
        model, length = self.settings.get("model"), str(self.settings.get("sequence_length"))
        has_tokens = length.isdigit() and self.settings.get("corpus") != "random_vectors"
        tokens = f"sequences of {int(length):,} tokens" if has_tokens else None
        return ", ".join(str(part) for part in (model, tokens) if part)

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


def to_html(report: Report, running: str | None = None, source: Source | None = None) -> str:
    """Return the report as one HTML page with its charts, the scripts that draw them, and links to its source.

    `running` says how far a job is that is not finished; the page then says so, and loads itself again.
    """
    own = (files("pipeline.report") / "page.js").read_text()
    figures = [*report.headlines, *(figure for section in report.sections for figure in section.headlines)]
    words = [f"{one.title} {one.value} {one.detail}" for one in figures]
    titles = [*(section.title for section in report.sections), *(plot.title for plot in report.plots)]
    terms = terms_in(" ".join((_markdown(report), *words, *titles)))
    return _template().render(report=report, running=running, source=source, terms=terms, vega=javascript(), own=own)


def to_markdown(report: Report) -> str:
    """Return question, answer and tables for the description of an MLflow run, within MLflow's limit of length."""
    text = _markdown(report)
    if len(text) <= DESCRIPTION_CHARACTERS:
        return text
    return text[: DESCRIPTION_CHARACTERS - len(MORE)].rpartition("\n")[0] + MORE


def _markdown(report: Report) -> str:
    parts = [f"**{report.question}**", report.answer]
    for section in report.sections:
        parts += [f"{one.text} {one.evidence}: `{one.command}`" for one in section.suggestions if one.command]
        for table in (one for one in section.tables if one.lines):
            parts += [f"**{table.title}**", table.to_markdown(), *([table.note_on_page] if table.note_on_page else [])]
        parts += (*section.why, *section.notes, *section.left_out)
    return "\n\n".join(parts)


def sentence(text: str) -> Markup:
    """Return a text as HTML: no line ends in a number or before its unit, and what is between backticks is code."""
    escaped = str(escape(EXPONENT.sub("\N{WORD JOINER}", UNIT.sub("\N{NO-BREAK SPACE}", text))))
    return Markup(re.sub("`([^`]+)`", lambda found: code(Markup(found[1])), escaped))  # noqa: S704


def code(line: str) -> Markup:
    """Return a command as HTML, whose lines end between two settings."""
    first, *others = line.split(" --")
    parts = [Markup("<span>{}</span>").format(first), *map(Markup("<span>--{}</span>").format, others)]
    return Markup("<code>{}</code>").format(Markup(" ").join(parts))


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"sentence": sentence, "code": code}
    return environment.from_string((files("pipeline.report") / "page.html").read_text())
