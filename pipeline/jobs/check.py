"""`fitproof check --gpu CARD -- COMMAND`: whether a command needs more memory than a limit or a baseline allows."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.base.units import MIB, parse_budget
from pipeline.jobs.printing import say
from pipeline.jobs.simulate import (
    EXIT_CODE_DOES_NOT_FIT,
    SimulatedCommandSettings,
    SimulateSettings,
    only_answer_on_stdout,
    run_simulation,
    wanted_run,
)
from pipeline.prediction.commands.memory_baseline import (
    MemoryBaseline,
    baseline_of,
    check_comparable,
    read_baseline,
    write_baseline,
)
from pipeline.prediction.commands.memory_check import CheckVerdict, Limit, MemoryCheck, check_memory, limits_of
from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import python_of
from pipeline.simulation.torch_build import find_torch

EXIT_CODES = {CheckVerdict.PASSED: 0, CheckVerdict.TOO_LARGE: EXIT_CODE_DOES_NOT_FIT, CheckVerdict.NONE: 1}
PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
OF_SIMULATE = {*SimulatedCommandSettings.model_fields}
"""Names of the settings that it has in common with `simulate`."""
FORMATS = {".json": "json", ".md": "markdown", ".xml": "junit"}
"""The format of a file of the answer, by its suffix."""


class CheckSettings(SimulatedCommandSettings):
    """The settings of `check`."""

    max_allocated: str | None = None
    """The most that the tensors of a process may take at its peak, such as 30GiB or 40% of the card; none: no limit."""
    max_reserved: str | None = None
    """The most that torch's allocator may take of a card, likewise."""
    baseline: str | None = None
    """JSON file of the memory that was accepted, for git; update writes it. none: limits alone."""
    tolerance: str = "1%"
    """How much more than the baseline is allowed, of either peak."""
    update: bool = False
    """Write what the command needs now to the baseline, instead of comparing the two."""
    answer: Literal["text", "json", "markdown", "junit"] = "text"
    """How the answer is written to stdout; but for text it is all of stdout, and all else is written to stderr."""
    answer_files: str | None = None
    """Files to write the answer to as well, separated by commas: .md (Markdown), .xml (JUnit), .json."""


def check(settings: CheckSettings, console: Console) -> int:
    """Check the command and print the answer; return 0 if it passed, 3 if it is too large, 1 if it failed otherwise.

    Raises:
        InvalidInputError: a setting or the baseline is wrong, or the command uses no card.

    """
    limits, files = list(_limits(settings)), _answer_files(settings)
    percent, baseline = _percent(settings), _baseline(settings, is_limited=bool(limits))
    if baseline is not None and not settings.update:
        limits += limits_of(baseline, str(settings.baseline), percent)
    with only_answer_on_stdout(settings.answer):
        with tempfile.TemporaryDirectory(prefix="fitproof-") as folder:
            simulated = SimulateSettings(**settings.model_dump(include=OF_SIMULATE), smallest=False)
            found = run_simulation(simulated, Path(folder), partial(say, console))
        checked = check_memory(found, settings.command, limits, baseline, settings.baseline)
        if settings.update and settings.baseline is not None:
            is_accepted = checked.verdict is CheckVerdict.PASSED
            if is_accepted:
                write_baseline(Path(settings.baseline), baseline_of(found, settings.command))
            console.print(f"{settings.baseline} was {'written' if is_accepted else 'not written'}", highlight=False)
    for file, kind in files.items():
        _write(file, _written(checked, kind))
    if settings.answer == "text":
        _show(checked, console)
    else:
        print(_written(checked, settings.answer).rstrip())  # noqa: T201
    return EXIT_CODES[checked.verdict]


def _limits(settings: CheckSettings) -> Iterator[Limit]:
    """Yield the limits that are set.

    Raises:
        InvalidInputError: one is no amount of memory, or more than the card has.

    """
    memory_bytes = find_card(settings.gpu).memory_mib * MIB
    for peak, text in {"allocated": settings.max_allocated, "reserved": settings.max_reserved}.items():
        if text is not None:
            allowed_bytes = parse_budget(text, memory_bytes, f"max_{peak}")
            yield Limit(peak=peak, allowed_bytes=allowed_bytes, source=f"the limit of {text}")


def _percent(settings: CheckSettings) -> float:
    percent = PERCENT.fullmatch(settings.tolerance.strip())
    if percent is None:
        raise InvalidInputError(
            f"tolerance must be a percentage from 0% on, and is {settings.tolerance!r}; write for example 1% or 0.5%"
        )
    return float(percent[1])


def _baseline(settings: CheckSettings, *, is_limited: bool) -> MemoryBaseline | None:
    """Return the baseline; None without one, or if it is yet to be written.

    Raises:
        InvalidInputError: nothing is to be checked, or the baseline is wrong.

    """
    if settings.baseline is None:
        if settings.update or not is_limited:
            what = "update writes a baseline, and none is named" if settings.update else "neither is given"
            raise InvalidInputError(
                f"check compares with a limit or with a baseline, and {what}; set --baseline memory.json, or a limit: "
                "--max_reserved 38GiB or --max_allocated 38GiB"
            )
        return None
    file = Path(settings.baseline)
    if settings.update and not file.exists():
        return None
    baseline = read_baseline(file)
    if not settings.update:
        run = wanted_run(settings)
        check_comparable(baseline, file, card=run.card.name, torch=find_torch(python_of(run.command)).version)
    return baseline


def _answer_files(settings: CheckSettings) -> Mapping[Path, str]:
    """Return the format of each file that is to be written."""
    files = [Path(part.strip()) for part in (settings.answer_files or "").split(",") if part.strip()]
    for file in files:
        if file.suffix not in FORMATS:
            raise InvalidInputError(
                f"a file of answer_files ends with {', '.join(FORMATS)}, which says its format, and {file} does not; "
                "name it so"
            )
    return {file: FORMATS[file.suffix] for file in files}


def _written(checked: MemoryCheck, kind: str) -> str:
    from pipeline.report.memory_check import check_report, to_json, to_junit
    from pipeline.report.page import to_markdown

    if kind == "markdown":
        return to_markdown(check_report(checked)) + "\n"
    return to_json(checked) if kind == "json" else to_junit(checked)


def _write(file: Path, content: str) -> None:
    try:
        write_atomically(file, content.encode())
    except OSError as error:
        raise InvalidInputError(
            f"answer_files must name files that can be written, and {file} cannot be ({error.strerror}); name another"
        ) from error


def _show(checked: MemoryCheck, console: Console) -> None:
    """Print the tables, and the answer last, where a reader of a long output looks."""
    from pipeline.jobs.publish import show
    from pipeline.report.memory_check import check_report

    show(check_report(checked), console)
