"""What the memory of a command on a simulated card depends on, so that it is simulated again where that has changed."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from pipeline.base.files import cache_folder
from pipeline.config.command import Command
from pipeline.config.command_template import LARGEST_FILE, Template, files_of
from pipeline.config.patched_file import FORMATS
from pipeline.prediction.prediction_cache import code_digest
from pipeline.simulation.cards import Card
from pipeline.simulation.torch_build import TorchBuild

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


def conditions(command: Command, build: TorchBuild, card: Card, sources: Sequence[tuple[str, str]]) -> str:
    """Return the command, its files and variables, the card, the packages beside its torch, and Fitproof's code."""
    facts = [
        *(list(command.words), dict(command.files), dict(command.environment), command.world_size),
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
