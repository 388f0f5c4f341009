"""Runs a training command in a process of its own, and receives the optimizer steps that its hook reports."""

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import psutil

from pipeline.base.processes import kill_family, unreadable
from pipeline.base.results import Finished, MemoryUse, Outcome, StepRecord
from pipeline.config.command import Command
from pipeline.runtime import command_hook
from pipeline.runtime.failures import Failed, how_it_ended
from pipeline.simulation import hook
from pipeline.training.loop import Stop

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 10.0
"""How long the command may take to end once its hook has ended its process."""
NO_UPLOADS = {"WANDB_MODE": "disabled"}
"""Variables that keep a run from being uploaded, unless the user has set them."""
NAMED = "the first word of a command is the name or path of a program, and variables are set with --env"
NO_STEP = (
    "it ended by itself without an optimizer step: a command must train with an optimizer of torch.optim, by a Python "
    "that reads PYTHONPATH"
)
NOT_ON_GPU = "it took its optimizer steps without memory of the GPU; let it train there, or set --device cpu"


def run_command(command: Command, _: None, emit: Callable[[Any], None], *, stop: Stop, folder: Path) -> None:
    """Run the command, emit its optimizer steps, and end it once `stop` or its number of steps says so.

    Its copies of patched files are in `folder`. It exits with the command's exit code if the command fails.
    """
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        words = command.with_copies(folder)
        try:
            with unreadable() as stdin:
                process = subprocess.Popen(  # in a session of its own it cannot ask at the terminal, and wait
                    words, env=_variables(command, path), stdin=stdin, start_new_session=True
                )
        except OSError as error:
            emit(Failed(Outcome.CRASHED, f"{words[0]} cannot be started ({error.strerror}); {NAMED}"))
            return
        try:
            received = _Received(command, emit, stop, process.pid)
            _receive(server, received, process)
        finally:
            kill_family(process.pid, SECONDS_TO_END)
            exit_code = process.wait()
            with contextlib.suppress(ProcessLookupError):  # what it has left in its session
                os.killpg(process.pid, signal.SIGKILL)
    received.conclude(exit_code)


def _variables(command: Command, path: str) -> dict[str, str]:
    """Return the environment of the command: that of this process, which has the command's own already."""
    python_path = [str(Path(hook.__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {
        command_hook.SOCKET: path,
        "SIMULATED_CARD_HOOKS": str(Path(command_hook.__file__)),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }
    if command.device.type == "cuda":
        own[command_hook.BUDGET] = str(command.budget_bytes)
    return {**NO_UPLOADS, **os.environ, **own}


def _receive(server: socket.socket, received: "_Received", process: "subprocess.Popen[bytes]") -> None:
    """Pass on what the processes of the command send, until it has ended or is to end."""
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while not received.is_over:
            ready = selector.select(SECONDS_BETWEEN_LOOKS)
            if not ready and process.poll() is not None:
                return
            for key, _ in ready:
                if key.fileobj is server:
                    connection, _ = server.accept()
                    selector.register(connection, selectors.EVENT_READ, connection.makefile("rw"))
                elif line := key.data.readline():
                    received.message(json.loads(line), key.data)
                else:
                    selector.unregister(key.fileobj)
    received.end(process)


@dataclass
class _Received:
    """What the processes of a command have sent so far."""

    command: Command
    emit: Callable[[Any], None]
    stop: Stop
    pid: int
    is_over: bool = False
    failure: Failed | None = None
    _steps: list[float] = field(default_factory=list)
    """Seconds of each optimizer step."""
    _waiting: dict[int, tuple[Mapping[str, Any], TextIO]] = field(default_factory=dict)
    """The message of each rank that has ended its step, and where to answer it."""
    _formats: set[str] = field(default_factory=set)
    _memory: MemoryUse | None = None
    _passes_per_micro_batch: float | None = None

    def message(self, message: Mapping[str, Any], reply: TextIO) -> None:
        """Receive the end of an optimizer step of one rank, or that it ran out of memory."""
        if "out_of_memory" in message:
            self.failure = self.failure or Failed(Outcome.OUT_OF_MEMORY, message["out_of_memory"])
            _answer(reply, "go")
            return
        self._waiting[message["rank"]] = message, reply
        if len(self._waiting) < message["world_size"]:
            return
        ranks = [one for one, _ in self._waiting.values()]
        self._end_step(ranks)
        if not self.is_over:
            for _, waiting in self._waiting.values():
                _answer(waiting, "go")
            self._waiting.clear()

    def _end_step(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        if reason := _contradiction(self.command, ranks[0]):
            self.failure, self.is_over = Failed(Outcome.CRASHED, reason), True
            return
        record = _record(self.command, len(self._steps), ranks)
        self._steps.append(record.seconds)
        self._formats.update(name for rank in ranks for name in rank["formats"])
        self.emit(record)
        self._memory = _memory(ranks)
        self.emit(self._memory)
        if expected := self.command.accumulation_steps:
            self._passes_per_micro_batch = ranks[0]["num_passes"] / expected
        if any(_is_no_number(rank["loss"]) for rank in ranks) and not record.skipped:
            detail = f"the loss of optimizer step {record.step} is not finite"
            self.failure, self.is_over = Failed(Outcome.DIVERGED, detail), True
            return
        positions = self.command.effective_batch_size
        has_enough = len(self._steps) >= self.command.num_steps
        self.is_over = has_enough or self.stop([seconds / positions for seconds in self._steps])

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """Let the hook end the processes that wait for an answer, and end all others of the command."""
        others = psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else []
        for _, reply in self._waiting.values():
            _answer(reply, command_hook.END)
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            kill_family(process.pid, SECONDS_TO_END)
        for other in others:
            kill_family(other.pid, SECONDS_TO_END)

    def conclude(self, exit_code: int) -> None:
        """Emit how the command ended; exit with its exit code if it failed by itself."""
        needed = self.command.timing_warmup_steps + 1
        if self.failure is not None:
            self.emit(self.failure)
        elif not self.is_over and exit_code < 0:
            self.emit(how_it_ended(exit_code))
        elif not self.is_over and exit_code:
            sys.exit(exit_code)
        elif not self._steps:
            self.emit(Failed(Outcome.CRASHED, NO_STEP))
        elif len(self._steps) < needed:
            taken = f"it ended by itself after {len(self._steps)} optimizer steps"
            self.emit(Failed(Outcome.CRASHED, f"{taken}, and {needed} are needed to time one; let it train longer"))
        elif self.command.device.type == "cuda" and self._memory and self._memory.peak_bytes is None:
            self.emit(Failed(Outcome.CRASHED, NOT_ON_GPU))
        else:
            formats = tuple(sorted(self._formats))
            self.emit(Finished(number_formats=formats, passes_per_micro_batch=self._passes_per_micro_batch))


def _is_no_number(loss: float | None) -> bool:
    """Whether a loss is known and not finite."""
    return loss is not None and not math.isfinite(loss)


def _contradiction(command: Command, rank: Mapping[str, Any]) -> str | None:
    """Return how the passes of an optimizer step contradict the effective batch; None if they do not."""
    if rank["world_size"] != command.world_size:
        started = f"the command started {rank['world_size']} processes, and world_size is {command.world_size}"
        return f"{started}; set --world_size {rank['world_size']}"
    expected, found = command.accumulation_steps, rank["num_passes"]
    if expected is None or not found or found % expected == 0:
        return None
    return (
        f"an effective batch of {command.effective_batch_size} at micro_batch_size={command.micro_batch_size} takes "
        f"{expected} backward passes in an optimizer step, and the script made {found}; give it {{accumulation_steps}} "
        "or {effective_batch_size} as an option, or set --effective_batch_size to what it trains with"
    )


def _record(command: Command, number: int, ranks: Sequence[Mapping[str, Any]]) -> StepRecord:
    losses = [rank["loss"] for rank in ranks if rank["loss"] is not None]
    learning_rate = ranks[0]["learning_rate"]
    return StepRecord(
        step=number,
        loss=statistics.fmean(losses) if len(losses) == len(ranks) else float("nan"),
        grad_norm=float("nan"),
        seconds=max(rank["seconds"] for rank in ranks),
        positions=command.effective_batch_size,
        learning_rate=float("nan") if learning_rate is None else learning_rate,
        skipped=ranks[0]["skipped"],
    )


def _memory(ranks: Sequence[Mapping[str, Any]]) -> MemoryUse:
    """Return the memory of the command: of GPUs that of the rank with the most, on a CPU that of all ranks."""
    is_cuda = all("reserved" in rank["peaks"] for rank in ranks)
    allocated = [rank["peaks"]["allocated"] for rank in ranks if "allocated" in rank["peaks"]]
    total = max if is_cuda else sum
    return MemoryUse(
        peak_allocated_bytes=total(allocated) if len(allocated) == len(ranks) else None,
        peak_reserved_bytes=max(rank["peaks"]["reserved"] for rank in ranks) if is_cuda else None,
        peak_process_bytes=sum(rank["process_bytes"] for rank in ranks),
    )


def _answer(reply: TextIO, text: str) -> None:
    reply.write(f"{text}\n")
    reply.flush()
