"""The variables by which a process, and all that it starts, runs on simulated cards."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.simulation.cards import Card
from pipeline.simulation.library import FILE_NAME, MAX_CARDS, library_for, preloaded, programs
from pipeline.simulation.torch_build import find_torch

HOOK = Path(__file__).parent / "hook"
"""Folder of the module that Python runs when it starts."""
EXECUTED = "'''exec' "
"""What begins the second line of a script of pip that a shell starts, since the path of its Python is long."""


def environment(
    card: Card,
    *,
    python: Path,
    num_cards: int = 1,
    budget_bytes: int | None = None,
    report: Path | None = None,
    values: bool = False,
    hooks: Sequence[Path] = (),
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the variables to add to `base`, so that a process runs on a machine with so many of these cards.

    Args:
        card: the model of all cards.
        python: the interpreter of the environment whose torch will run.
        num_cards: how many of them the machine has.
        budget_bytes: what is free on each of them beside its context, in whole MiB; all of it if None.
        report: an existing folder, into which each process writes what it did (report.py reads it).
        values: whether small tensors' values are computed on the host too, for programs whose course depends on them.
        hooks: Python files that every process runs as soon as it has imported torch.
        base: the environment that the process would have without a card.

    Raises:
        InvalidInputError: the environment has no CUDA build of torch, the library cannot be compiled, or the machine
            cannot be so.

    """
    check_num_cards(num_cards)
    library = _library(python)
    variables = {
        **card_variables(card, num_cards, budget_bytes),
        "LD_PRELOAD": _with(preloaded(library), base.get("LD_PRELOAD", ""), " :"),
        "PATH": _with([programs(library)], base.get("PATH", os.defpath), ":"),
        "PYTHONPATH": _with([HOOK], base.get("PYTHONPATH", ""), ":"),
        "TRITON_LIBCUDA_PATH": str(library),  # Triton links its launchers to the driver's library there
    }
    if "CUDA_VISIBLE_DEVICES" in base:  # it speaks of this machine's own cards
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(num_cards)))
    if report is not None:
        variables["SIMULATED_CARD_REPORT"] = str(report.absolute())
    names = ("compiler", "reads", "collectives", *(["values"] if values else []))
    own = (HOOK / f"{name}.py" for name in names)
    variables["SIMULATED_CARD_HOOKS"] = os.pathsep.join(map(str, (*own, *hooks)))
    return variables


def card_variables(card: Card, num_cards: int = 1, budget_bytes: int | None = None) -> dict[str, str]:
    """Return the variables that say what the cards are; what is free beside the context is all of it by default."""
    major, minor = card.capability
    return {
        "SIMULATED_CARD_NAME": card.name,
        "SIMULATED_CARD_CAPABILITY": f"{major}.{minor}",
        "SIMULATED_CARD_MULTIPROCESSORS": str(card.num_multiprocessors),
        "SIMULATED_CARD_CLOCKS": f"{card.multiprocessor_mhz},{card.memory_mhz},{card.bus_bits},{card.l2_mib}",
        "SIMULATED_CARD_MEMORY_MIB": str(card.memory_mib),
        "SIMULATED_CARD_CONTEXT_MIB": str(card.context.mib),
        "SIMULATED_CARD_OTHERS_MIB": str(_others_mib(card, budget_bytes)),
        "SIMULATED_CARD_COUNT": str(num_cards),
    }


def check_num_cards(num_cards: int) -> None:
    """Raise InvalidInputError if a simulated machine cannot have so many cards."""
    if not 1 <= num_cards <= MAX_CARDS:
        raise InvalidInputError(f"a simulated machine has 1 to {MAX_CARDS} cards, not {num_cards}")


def python_of(command: Sequence[str]) -> Path:
    """Return the interpreter that a command runs: python itself, that of a script's first line, or the shell's python.

    The last is for commands that start Python on their own, such as a shell script or the shims of pyenv.

    Raises:
        InvalidInputError: there is no such command, or no Python.

    """
    found = shutil.which(command[0])
    if found is None:
        raise InvalidInputError(
            f"the command must be on this machine, and {command[0]!r} is not; write it as in a shell: "
            "fitproof simulate --gpu t4 -- python train.py"
        )
    for name in (found, *_first_words(Path(found))[:1], "python", "python3"):
        program = shutil.which(name)
        if program is not None and is_python(program):
            return _executable(program)
    raise InvalidInputError(f"a simulated card runs Python, and {command[0]!r} starts none that is on the path; add it")


def is_python(program: str) -> bool:
    """Whether a program is Python, or starts as it, as a shim does."""
    return Path(program).name.startswith("python")


def is_script(program: Path) -> bool:
    """Whether Python can read a program: it is started by Python."""
    words = _first_words(program)
    return bool(words) and is_python(words[0])


def _first_words(program: Path) -> list[str]:
    """Return what a script's first line starts it by, or the second one of pip's shell, without env and its options."""
    with program.open("rb") as file:
        lines = file.read(4096).decode(errors="replace").splitlines()
    if not lines or not lines[0].startswith("#!"):
        return []
    if lines[1:] and lines[1].startswith(EXECUTED):
        before, _, _ = lines[1].removeprefix(EXECUTED).rpartition('"$0" "$@"')
        words = shlex.split(before) if before.count('"') % 2 == 0 else before.split()
        return [word for word in words if not word.startswith("-")][-1:]
    words = lines[0][2:].split()
    is_env = bool(words) and Path(words[0]).name == "env"
    return [word for word in words[1:] if not word.startswith("-") and "=" not in word] if is_env else words


@cache
def _executable(program: str) -> Path:
    """Return the interpreter that a program is, or that it starts, as a shim does."""
    words = [program, "-c", "import sys; print(sys.executable)"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
    return Path(said[-1] if said else program)  # what runs as Python starts may say something of its own before


@cache
def _library(python: Path) -> Path:
    return library_for(find_torch(python))


def _others_mib(card: Card, budget_bytes: int | None) -> int:
    """Return what others use of a card, so that no more than the budget is free beside the context."""
    free_mib = card.memory_mib - card.context.mib
    if free_mib <= 0:
        raise InvalidInputError(
            f"a card must have more memory than its CUDA context, and {card.name} has {card.memory_mib} MiB and its "
            f"context takes {card.context.mib}; name another card"
        )
    if budget_bytes is None:
        return 0
    if not 0 < budget_bytes <= free_mib * MIB:
        raise InvalidInputError(
            f"a budget is what is free beside the context of {card.name}: at most {free_mib} MiB, not "
            f"{budget_bytes / MIB:.0f}; name a smaller one or another card"
        )
    return free_mib - budget_bytes // MIB


def _with(files: Sequence[Path], before: str, separators: str) -> str:
    """Return a list of paths with these in front of those that it had, which any of the separators divides."""
    if odd := [str(file) for file in files if set(separators) & set(str(file))]:
        raise InvalidInputError(
            f"the paths of a simulated card must have no space and no colon, and one is {odd[0]!r}; "
            "set FITPROOF_CACHE to another folder, or install Fitproof in one"
        )
    others = [path for path in re.split(f"[{separators}]", before) if not _is_ours(Path(path))] if before else []
    return ":".join([*map(str, files), *others])


def _is_ours(path: Path) -> bool:
    """Whether a process that is on a simulated card itself has this path from there."""
    return path == HOOK or os.path.exists(path.parent / FILE_NAME)  # noqa: PTH110  Path.exists() may raise an error
