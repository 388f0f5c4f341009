"""Explains an out-of-memory message by simulating its command on its card, and finds the smallest change that fits."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path

from pipeline.base.files import last_lines
from pipeline.config.command_template import Template
from pipeline.memory.allocator_options import VARIABLES
from pipeline.memory.out_of_memory import OutOfMemoryMessage
from pipeline.prediction.commands.failed_allocation import with_tensor
from pipeline.prediction.commands.levers import Change, command_with
from pipeline.prediction.commands.simulation import Simulation, Verdict, simulate, what_runs
from pipeline.prediction.commands.smallest_memory import device_bytes, replayed, run_in
from pipeline.simulation.run import Simulate, SimulatedRun, on_cuda_build, with_room


@dataclass(frozen=True, kw_only=True)
class Try:
    """Changes of the command, and what it then needs."""

    changes: tuple[Change, ...]
    needed_bytes: int | None
    """The least memory of a card on which it runs; None if it failed."""
    fits: bool
    failure: str | None = None
    """How it ended, if not by itself."""

    @property
    def shown(self) -> str:
        """The changes as they are written in a shell."""
        return " ".join(change.shown for change in self.changes)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a command ran out of memory on a card, and what was tried."""

    message: OutOfMemoryMessage
    simulation: Simulation
    tries: tuple[Try, ...]
    """The command as it is, each lever alone, then together."""
    answer: Try | None
    """The smallest change with which the command ran on the card; None if none did, or if it runs as it is."""
    answer_command: tuple[str, ...]
    """The command with it, after its variables."""

    @property
    def is_reproduced(self) -> bool:
        """Whether the command runs out of memory in the simulation."""
        return self.simulation.verdict is Verdict.DOES_NOT_FIT


def explain(
    wanted: Simulate,
    template: Template,
    levers: Sequence[tuple[Change, ...]],
    message: OutOfMemoryMessage,
    folder: Path,
    say: Callable[[str], None],
    *,
    may_need_values: bool,
) -> Explanation:
    """Simulate the command of `wanted` on its card, and try the levers if it does not fit.

    A try is one run on a card with room, whose requests torch's allocator is given again under caps; the answer is
    confirmed by a run on the card itself.

    Raises:
        InvalidInputError: the command cannot be started, or uses no card.

    """
    say(what_runs(wanted))
    found = simulate(wanted, folder, say, may_need_values=may_need_values, finds_smallest=False)
    tries: tuple[Try, ...] = ()
    answer = None
    if found.verdict is Verdict.DOES_NOT_FIT and found.out_of_memory is not None:
        wanted = replace(wanted, values=found.with_values)
        say("running it again, to see which tensor finds no memory")
        failed = with_tensor(found.out_of_memory, wanted, folder / "tensor")
        found = replace(found, out_of_memory=failed)
        tries, answer = _Tries(wanted, template, folder, say, found.memory_bytes).all_of(levers)
    changes = () if answer is None else answer.changes
    variables = [f"{name}={value}" for name, value in _variables(changes).items()]
    return Explanation(
        message=message,
        simulation=found,
        tries=tries,
        answer=answer,
        answer_command=(*variables, *command_with(template, changes)),
    )


class _Tries:
    """Tries changes of a command."""

    def __init__(
        self, wanted: Simulate, template: Template, folder: Path, say: Callable[[str], None], memory_bytes: int
    ) -> None:
        self._wanted, self._template, self._folder, self._say = wanted, template, folder, say
        self._memory_bytes = memory_bytes
        self._run = cache(self._run_with_room)
        self._numbers = count(1)

    def all_of(self, levers: Sequence[tuple[Change, ...]]) -> tuple[tuple[Try, ...], Try | None]:
        """Return what was tried, and the smallest change that was confirmed by a run on the card.

        Each lever alone, the smallest change first; then one after another is added, that which saves most first, until
        they fit, or all of them at once where one alone is the answer.
        """
        unchanged = self._try(())
        of_each = [self._in_turn((change,) for change in changes) for changes in levers]
        alone = [one for tries in of_each for one in tries]
        answer = next((one for one in alone if one.fits and self._is_confirmed(one)), None)
        known = ([one for one in tries if one.needed_bytes is not None] for tries in of_each)
        strongest = sorted((min(tries, key=_needed) for tries in known if tries), key=_needed)
        ordered = [one.changes[0] for one in strongest]
        numbers = range(2 if answer is None else max(2, len(ordered)), len(ordered) + 1)
        together = self._in_turn(tuple(ordered[:number]) for number in numbers)
        if answer is None and together and together[-1].fits:
            together += self._without_needless(together[-1])
            fitting = sorted((one for one in together if one.fits), key=lambda one: len(one.changes))
            answer = next((one for one in fitting if self._is_confirmed(one)), None)
        return (unchanged, *alone, *together), answer

    def _in_turn(self, some: Iterable[tuple[Change, ...]]) -> list[Try]:
        """Try some changes after others, until they fit."""
        found: list[Try] = []
        for changes in some:
            found.append(self._try(changes))
            if found[-1].fits:
                break
        return found

    def _without_needless(self, fitting: Try) -> list[Try]:
        """Leave out one change after another without which the command fits too, the earliest added first."""
        found: list[Try] = []
        kept = fitting.changes
        for change in fitting.changes[:-1]:
            fewer = tuple(one for one in kept if one != change)
            if len(fewer) > 1:
                found.append(self._try(fewer))
                kept = fewer if found[-1].fits else kept
        return found

    def _try(self, changes: tuple[Change, ...]) -> Try:
        variables = _variables(changes)
        others = {name: value for name, value in variables.items() if name not in VARIABLES}
        wanted, run = self._run(command_with(self._template, changes), tuple(others.items()))
        if not run.is_complete or not run.records:
            *_, last = "no output", *last_lines(run.folder.with_suffix(".log"))
            failure = run.shortfall or f"exit code {run.exit_code}: {last}"
            return Try(changes=changes, needed_bytes=None, fits=False, failure=failure)
        allocator = {name: value for name, value in variables.items() if name in VARIABLES}
        [needed] = replayed(wanted, run, [allocator])
        if needed is None:  # its requests cannot be given again: what it used with room is enough
            needed = max(device_bytes(run, record) for record in run.records)
        return Try(changes=changes, needed_bytes=needed, fits=needed <= self._memory_bytes)

    def _run_with_room(
        self, command: tuple[str, ...], variables: tuple[tuple[str, str], ...]
    ) -> tuple[Simulate, SimulatedRun]:
        self._say(f"trying {shlex.join(command)}")
        wanted = self._with(command, dict(variables))
        return wanted, run_in(with_room(wanted), self._next_folder())

    def _is_confirmed(self, one: Try) -> bool:
        """Whether the command with these changes runs on the card."""
        self._say(f"running it on the card with {one.shown}")
        wanted = self._with(command_with(self._template, one.changes), _variables(one.changes))
        return run_in(wanted, self._next_folder()).is_complete

    def _with(self, command: tuple[str, ...], variables: Mapping[str, str]) -> Simulate:
        return replace(self._wanted, command=on_cuda_build(command, may_install=False), variables=variables)

    def _next_folder(self) -> Path:
        return self._folder / f"try_{next(self._numbers)}"


def _needed(one: Try) -> int:
    assert one.needed_bytes is not None  # only of those that did not fail
    return one.needed_bytes


def _variables(changes: Iterable[Change]) -> dict[str, str]:
    return {name: value for change in changes for name, value in change.variables.items()}
