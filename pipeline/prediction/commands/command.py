"""Predicts the memory of commands: each runs once on a simulated card with room, and is kept in the cache folder."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Event

from pydantic import TypeAdapter

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import cores
from pipeline.base.progress import progress
from pipeline.config.command import Command, remedies
from pipeline.config.command_template import Template
from pipeline.memory.work import Work
from pipeline.prediction.commands.simulation import WORK_HOOK, Verdict, simulate
from pipeline.prediction.prediction_cache import cache_file, read_cached, write_cached
from pipeline.simulation.cards import Card
from pipeline.simulation.environment import environment, python_of
from pipeline.simulation.run import Simulate, on_cuda_build, with_room
from pipeline.simulation.torch_build import TorchBuild, find_torch

MEMORY = Path(__file__).parents[2] / "memory"
COUNTERS = ("work", "work_counter", "flops", "collectives", "attention_saved")
COUNTING = (WORK_HOOK, *(MEMORY / f"{module}.py" for module in COUNTERS))
"""Files on which the work depends that is counted of a command."""
LAST_LINES = 5
"""Last lines of a command's output that are said when it fails."""
LARGEST_FOLDER = 2000
"""Files of the scripts' folders that are looked at, at most, to tell whether a script has changed."""
VARIABLES = ("CUDA_", "PYTORCH_", "TORCH_", "NVIDIA_")
"""How the names of environment variables begin on which memory may depend."""
ONE_THREAD = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
"""Of a command on the host: as many commands run at a time as there are cores."""
_NEED_VALUES = set[tuple[str, ...]]()
"""Current folder and first words of commands that need the values of small tensors: they need not run without first."""


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
    text = f"simulating {len(commands)} commands on {card.name}"
    with ThreadPoolExecutor(max(1, len(cores()))) as pool, progress(text, len(commands)) as advance:
        try:
            for outcome in pool.map(partial(_predict, card=card, may_install=may_install, stop=stop), commands):
                outcomes.append(outcome)
                advance(1)
        except BaseException:  # the pool is left once what runs in it has ended
            stop.set()
            raise
    return outcomes


def _predict(command: Command, card: Card, may_install: bool, stop: Event) -> Predicted:
    build = _build(python_of(on_cuda_build(command.words, may_install)))
    file = cache_file(_conditions(command, build, card))
    if (cached := read_cached(file, PREDICTION)) is not None:
        return cached
    folder = Path(tempfile.mkdtemp(prefix="fitproof-"))
    wanted = Simulate(
        command=on_cuda_build(command.with_copies(folder), may_install),
        card=card,
        num_cards=command.world_size,
        variables={**ONE_THREAD, **command.environment},
        time_limit_seconds=command.time_limit,
        stop=stop,
        hook=WORK_HOOK,
    )
    try:
        outcome = _simulated(wanted, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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
        return InvalidInputError(why_not(folder, found.exit_code, found.notes))
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
    lines = [line for log in logs[-1:] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = [f"on the simulated card it ended with exit code {exit_code}", *lines[-LAST_LINES:]]
    return "\n".join([*said, *remedies("\n".join(said))])


def _conditions(command: Command, build: TorchBuild, card: Card) -> str:
    """Return what the memory depends on: the command, its files, its variables, the card and torch."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    facts = [
        *(
            list(CommandPrediction.__dataclass_fields__),
            list(command.words),
            dict(command.files),
            dict(command.environment),
            variables,
            command.world_size,
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in COUNTING],
        ),
        *(asdict(replace(card, memory_mib=0)), build.version, str(build.folder)),
        *(Template(command.words).digests, list(_sources(command.words)), str(Path.cwd())),
    ]
    return json.dumps(facts, sort_keys=True)


@cache
def _build(python: Path) -> TorchBuild:
    return find_torch(python)


def _sources(words: Sequence[str]) -> Iterable[tuple[str, int, int]]:
    """Yield name, size and time of the Python files beside the scripts of a command, which they may import."""
    folders = dict.fromkeys(Path(word).parent for word in words if word.endswith(".py") and Path(word).is_file())
    files = [file for folder in folders for file in [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]]
    for file in files[:LARGEST_FOLDER]:
        yield str(file), file.stat().st_size, file.stat().st_mtime_ns
