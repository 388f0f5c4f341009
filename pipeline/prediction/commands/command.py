"""Predicts the memory of commands: each runs once on a simulated card with room, and is kept in the cache folder."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event

from pydantic import TypeAdapter

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder, last_lines
from pipeline.base.processes import num_cores
from pipeline.base.progress import progress
from pipeline.config.command import Command, remedies
from pipeline.config.command_template import LARGEST_FILE, Template, files_of
from pipeline.config.patched_file import FORMATS
from pipeline.memory.work import Work
from pipeline.prediction.commands.simulation import WORK_HOOK, Verdict, simulate
from pipeline.prediction.prediction_cache import cache_file, code_digest, read_cached, write_cached
from pipeline.simulation.cards import Card
from pipeline.simulation.environment import environment, python_of
from pipeline.simulation.run import Simulate, on_cuda_build, with_room
from pipeline.simulation.torch_build import TorchBuild, find_torch

ONE_THREAD = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
"""Of a command on the host: as many commands run at a time as there are cores."""
_NEED_VALUES = set[tuple[str, ...]]()
"""Current folder and first words of commands that need the values of small tensors: they need not run without first."""

LARGEST_FOLDER = 2000
"""Files of the folders of a command that are looked at, at most, to tell whether it has changed."""
DEEPEST = 4
"""How far below these folders files are looked for."""
SCRIPTS = (".py", ".sh")
SOURCES = (*SCRIPTS, *FORMATS)
RESULTS = re.compile(r"runs|mlruns|wandb|lightning_logs|__pycache__|\..*|\d{8}-\d{6}-.*")
"""Folders that runs write into; the last are those of Fitproof's jobs."""
OWN_ANSWERS = ("best.", "best-")
"""How the names of files begin that a search writes into the current folder."""
OF_A_SESSION = re.compile(
    r"_\w*|(OLD)?PWD|SHLVL|COLUMNS|LINES|DISPLAY|WINDOWID|TMPDIR|XDG_SESSION_ID|INVOCATION_ID|JOURNAL_STREAM|"
    r"(TERM|SSH_|TMUX|STY|VSCODE_|ITERM_|KITTY_|KONSOLE_|GNOME_TERMINAL_|WT_|JPY_|"
    r"SLURM_JOB|GITHUB_|RUNNER_|CI_|PYTEST_|MLFLOW_|FITPROOF_)\w*"
)
"""Variables that differ between runs of one command: those of the terminal, of a job's number, of tracking.

Libraries set those for their own that begin with `_`, as MLflow for its sessions."""


@dataclass(frozen=True, kw_only=True)
class CommandPrediction:
    """The memory of a command on a simulated card, of the process that uses most."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    passes_work: Work | None = None
    """Work of all passes of an optimizer step; None if it is not known."""
    update_work: Work | None = None
    """Work of its update likewise."""


PREDICTION = TypeAdapter(CommandPrediction)
Predicted = CommandPrediction | InvalidInputError
"""A prediction, or why there is none."""


def predict_commands(commands: Sequence[Command], card: Card, may_install: bool) -> list[Predicted]:
    """Return the prediction of each command in their order; as many are simulated at a time as there are cores.

    Raises:
        InvalidInputError: no simulated card can run the commands.

    """
    first = on_cuda_build(commands[0].words, may_install)
    environment(card, python=python_of(first))  # so that one thread alone installs and compiles what all need
    outcomes, stop = [], Event()
    predict = partial(_predict, sources=sources_of(commands), card=card, may_install=may_install, stop=stop)
    text = f"simulating {len(commands)} commands on {card.name}"
    with ThreadPoolExecutor(num_cores()) as pool, progress(text, len(commands)) as advance:
        try:
            for outcome in pool.map(predict, commands):
                outcomes.append(outcome)
                advance(1)
        except BaseException:  # the pool is left once what runs in it has ended
            stop.set()
            raise
    return outcomes


def _predict(
    command: Command, sources: Sequence[tuple[str, str]], card: Card, may_install: bool, stop: Event
) -> Predicted:
    build = find_torch(python_of(on_cuda_build(command.words, may_install)))
    file = cache_file(conditions(command, build, card, sources))
    if (cached := read_cached(file, PREDICTION)) is not None:
        return cached
    with tempfile.TemporaryDirectory(prefix="fitproof-", ignore_cleanup_errors=True) as folder:
        wanted = Simulate(
            command=on_cuda_build(command.with_copies(Path(folder)), may_install),
            card=card,
            num_cards=command.world_size,
            variables={**ONE_THREAD, **command.environment},
            time_limit_seconds=command.time_limit,
            stop=stop,
            hook=WORK_HOOK,
        )
        outcome = _simulated(wanted, Path(folder))
    if isinstance(outcome, CommandPrediction):
        write_cached(file, PREDICTION, outcome)
    return outcome


def _simulated(wanted: Simulate, folder: Path) -> Predicted:
    program = (str(Path.cwd()), *wanted.command[:2])
    wanted = replace(with_room(wanted), values=program in _NEED_VALUES)
    try:
        found = simulate(wanted, folder, lambda _: None, may_need_values=True, finds_smallest=False, is_hidden=True)
    except InvalidInputError as error:  # it used no card, or reads what it must not
        return error
    if found.with_values:
        _NEED_VALUES.add(program)
    if found.verdict is not Verdict.FITS or not found.processes:
        reasons = found.notes if found.why_no_verdict is None else (found.why_no_verdict, *found.notes)
        return InvalidInputError(why_not(folder, found.exit_code, reasons))
    return CommandPrediction(
        passes_work=found.passes_work,
        update_work=found.update_work,
        peak_allocated_bytes=max(one.peak_allocated_bytes for one in found.processes),
        peak_reserved_bytes=max(one.peak_reserved_bytes for one in found.processes),
    )


def why_not(folder: Path, exit_code: int, notes: Sequence[str]) -> str:
    """Return what the command said last, or what limits the simulation."""
    if not exit_code:
        return " ".join(notes) or "it ended before its second optimizer step"
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    lines = [line for log in logs[-1:] for line in last_lines(log)]
    said = [f"on the simulated card it ended with exit code {exit_code}", *lines]
    return "\n".join([*said, *remedies("\n".join(said))])


def conditions(command: Command, build: TorchBuild, card: Card, sources: Sequence[tuple[str, str]]) -> str:
    """Return the command, its files, variables and time limit, the card, the packages beside torch, Fitproof's code."""
    facts = [
        *(list(command.words), dict(command.files), dict(command.environment), command.world_size, command.time_limit),
        *(Template(command.words).digests, sources, str(Path.cwd())),
        {name: value for name, value in os.environ.items() if not OF_A_SESSION.fullmatch(name)},
        *(asdict(replace(card, memory_mib=0)), build.version, str(build.folder)),
        sorted(package.name for package in build.folder.parent.glob("*.dist-info")),
        code_digest(),
    ]
    return json.dumps(facts, sort_keys=True)


def sources_of(commands: Iterable[Command]) -> list[tuple[str, str]]:
    """Return name and digest of the files that scripts may read: in the current folder, and beside the scripts."""
    words = dict.fromkeys(word for command in commands for word in command.words)
    scripts = [file for file in files_of(words) if file.suffix in SCRIPTS]
    folders = dict.fromkeys([Path(), *(script.parent for script in scripts)])
    files = islice((file for folder in folders for file in _files(folder)), LARGEST_FOLDER)
    return list(_digests(dict.fromkeys(files)))


def _digests(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        with suppress(OSError):  # what a run removes meanwhile
            if file.stat().st_size <= LARGEST_FILE:
                yield str(file), hashlib.sha256(file.read_bytes()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yield the sources in a folder and in those below it, but for results."""
    cache = cache_folder().resolve()
    for parent, folders, names in os.walk(folder):
        depth = len(Path(parent).relative_to(folder).parts)
        kept = [name for name in folders if not RESULTS.fullmatch(name) and Path(parent, name).resolve() != cache]
        folders[:] = sorted(kept) if depth < DEEPEST else []
        for name in sorted(names):
            if name.endswith(SOURCES) and not name.startswith(OWN_ANSWERS):
                yield Path(parent, name)
