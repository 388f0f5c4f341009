"""Programs on simulated cards, and what each did there: commands, or forks of one process that has imported torch."""

import atexit
import io
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.base.results import Result
from pipeline.config.experiment import Experiment
from pipeline.prediction.card_processes import card_processes
from pipeline.runtime import fork_server
from pipeline.runtime import run as runtime_run
from pipeline.runtime.rank import Work
from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import card_variables, environment
from pipeline.simulation.process import watch
from pipeline.simulation.report import Process, read_report
from pipeline.simulation.run import Simulate, SimulatedRun, run_command

RUN_WITH_TORCH = ("compiler.py", "reads.py", "collectives.py")
"""Hooks that have run in a process when its torch was imported."""


def run(*words: str, card: str = "h100", **options: Any) -> SimulatedRun:
    """Run Python with these words as a command."""
    wanted = Simulate(command=(sys.executable, *words), card=find_card(card), num_steps=None, **options)
    with tempfile.TemporaryDirectory() as folder:
        return run_command(wanted, Path(folder))


def run_code(
    code: str, *words: str, card: str = "h100", budget_bytes: int | None = None, values: bool = False
) -> SimulatedRun:
    """Run code in a fork, which need not import torch, as a command would: an error of it is raised here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = environment(
            find_card(card),
            python=Path(sys.executable),
            budget_bytes=budget_bytes,
            report=folder,
            values=values,
            hooks=[Path(watch.__file__)],
        )
        exit_code, _ = run_in_fork(code, words, variables)
        return SimulatedRun(exit_code=exit_code, records=(), processes=read_report(folder), folder=folder)


def run_in_fork(code: str, words: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Run code in a fork of a process that has imported torch and has no CUDA context; return its end and its output.

    Raises:
        RuntimeError: the code raised an error, or its process was killed.

    """
    own = {**os.environ, **variables}
    ended: tuple[int, str] = _in_fork(_run_here, (code, words, own), own)
    return ended


def execute_on(
    card: str | None, experiment: Experiment, log: Path, num_cards: int = 1, work: Work | None = None
) -> Result:
    """Return what execute() does on a machine with simulated cards, or on this one: None."""
    if card is None:
        return runtime_run.execute(experiment, log, work=work)
    variables = {**os.environ, **card_variables(find_card(card), num_cards)}
    result: Result = _in_fork(_execute_here, (experiment, log, work), variables)
    return result


def _in_fork(function: Callable[[Any], Any], argument: Any, variables: Mapping[str, str]) -> Any:
    [(_, outcome)] = card_processes().call(function, [argument], [variables])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _execute_here(asked: tuple[Experiment, Path, Work | None]) -> Result:
    """Train in a fork of this process, which is clean: the fork server of the tests is on another card."""
    experiment, log, work = asked
    forks = patch.object(runtime_run, "CONTEXT", multiprocessing.get_context("fork"))
    with forks, patch.object(fork_server, "start_server"):
        return runtime_run.execute(experiment, log, work=work)


def _run_here(program: tuple[str, Sequence[str], Mapping[str, str]]) -> tuple[int, str]:
    """Run code in this process, whose card is made already, to its end; return its exit code and what it printed."""
    code, words, variables = program
    os.environ.update(variables)  # those of the cards that its parent has kept for itself too
    for hook in variables["SIMULATED_CARD_HOOKS"].split(os.pathsep):
        if Path(hook).name not in RUN_WITH_TORCH:
            runpy.run_path(hook, run_name="simulated_card_hook")
    sys.argv[:] = ["-c", *words]
    exit_code = 0
    with redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            exit_code = int(end.code or 0)
        atexit._run_exitfuncs()
    return exit_code, out.getvalue()


def only(result: SimulatedRun) -> Process:
    """Return what the only process of a command did that ended well."""
    assert result.exit_code == 0
    [process] = result.processes
    return process
