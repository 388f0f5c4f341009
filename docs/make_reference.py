"""Write docs/reference.md, every setting with its type and default and the Python API, and docs/glossary.md.

python docs/make_reference.py
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import fitproof
from pipeline.cli import described
from pipeline.config.entry_points import SINGLE, SPACES, TOOLS, questions
from pipeline.jobs import export
from pipeline.report import shown
from pipeline.report.glossary import glossary

FILE = Path(__file__).with_name("reference.md")
OF_RUN = "main"
"""The entry point whose settings, but for its own, are those of a run."""
HIDDEN = ("of", "table", "to_frame")
"""What all results have, and is said once or is not for users."""


def reference() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference\n"
    yield "Every setting of the command line, of YAML files and of `-P name=value`, and the Python API. Written by"
    yield "`python docs/make_reference.py` from the code. What is measured:"
    yield "[metrics](metrics.md). What to use them for: [README](../README.md), [tutorial](tutorial.md).\n"
    yield "## Settings of an entry point\n"
    yield "Beside these, every entry point takes the [settings of a run](#settings-of-a-run); the tools take none of"
    yield "them. Entry points that compare variants have the setting `repeats`.\n"
    for entry in (*SINGLE, *SPACES, "combined", *TOOLS):
        own = next(iter(described(entry)))[1]
        yield f"### {entry}\n"
        yield f"{questions().get(entry, TOOLS.get(entry))}\n"
        yield from _table(own)
    (_, shared), *families = list(described(OF_RUN))[1:]
    yield "## Settings of a run\n"
    yield from _table(shared)
    for title, settings in families:
        name, _, text = title.partition(": ")
        yield f"### {name}\n"
        yield f"{text}.\n"
        yield from _table(settings)
    yield "## Python\n"
    yield "`import fitproof`: settings are keyword arguments with the names above, dotted ones dictionaries. Results"
    yield "are frozen: `print` shows question, answer and what `to_frame()` has, a notebook the answer's table.\n"
    for name in fitproof.__all__:
        member = getattr(fitproof, name)
        text = inspect.cleandoc(member.__doc__ or "").partition("\n\nRaises:")[0]
        yield f"### {name}\n"
        yield f"{text}\n"
        if inspect.isfunction(member):
            yield from _results(member)


def _results(function: Callable[..., object]) -> Iterator[str]:
    """Yield what each result of a function has, by the annotation of what it returns."""
    for name in str(inspect.signature(function).return_annotation).strip("'\"").split(" | "):
        kind = getattr(shown, name, None) or getattr(export, name)
        public = [attribute for attribute in dir(kind) if not attribute.startswith("_") and attribute not in HIDDEN]
        names = dict.fromkeys(["answer", *(field.name for field in fields(kind)), *public])
        yield f"{'An' if name[0] in 'AEIOU' else 'A'} `{name}` has {', '.join(f'`{each}`' for each in names)}.\n"


def _table(settings: list[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, kind, default, description in settings:
        cells = (f"`{name}`", kind, f"`{default}`", re.sub(r"\s+", " ", description))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


if __name__ == "__main__":
    FILE.write_text(reference())
    FILE.with_name("glossary.md").write_text(glossary())
