"""All evidence that needs a GPU, with one command that goes on where it stopped: make evidence.

    python benchmarks/evidence.py                 at most 9 minutes; again and again until nothing is left
    python benchmarks/evidence.py --minutes 60    at most an hour
    python benchmarks/evidence.py --sample        a few rows of each piece, to try the command

A piece is a benchmark of its own, which writes a dated table into --folder and ends when its time is over; the most
valuable comes first. --work holds what is complete, and the runs of the claims.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from exit_code import UNFINISHED, Deadline, exit_code_of

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.memory.device import device_name, find_device
from pipeline.runtime.signals import INTERRUPTED

ROOT = Path(__file__).parent.parent
SECONDS_TO_END = 60
"""Seconds before the limit from which on a piece begins no run."""
SECONDS_TO_STOP = 20
"""Seconds before the limit at which a piece is interrupted, and that it has to end."""


Values = Mapping[str, Any]
"""What the {placeholders} of pieces mean."""


@dataclass(frozen=True)
class Piece:
    """A benchmark: its command and what it needs."""

    name: str
    words: str
    """Of `python benchmarks/...`; {folder}, {work} and {date} are filled in."""
    sample: str
    """Words that make it short."""
    outputs: tuple[str, ...]
    """The files in the folder that it writes."""
    needs: tuple[str, ...] = ()
    """Packages besides torch, transformers and those that they need."""
    after: str | None = None
    """The piece whose complete output it reads."""
    resumes: bool = True
    """Whether it takes --minutes and goes on where it stopped; if not, it is short."""

    def command(self, values: Values, seconds: float) -> list[str]:
        """Return the command, which begins no run after so many seconds."""
        words = self.words.split() + (self.sample.split() if values["tiny"] else [])
        script, *others = [word.format(**values) for word in words]
        limit = ["--minutes", f"{seconds / 60:.3f}"] if self.resumes else []
        return [sys.executable, str(ROOT / "benchmarks" / script), *others, *limit]

    def absent(self) -> list[str]:
        """Return the packages that it needs and that are not installed."""
        return [name for name in (*NEEDS, *self.needs) if find_spec(name) is None]


NEEDS = ("pydantic", "psutil", "pynvml", "yaml", "numpy", "pyarrow")
"""Packages that every piece needs."""
FITPROOF = ("mlflow", "optuna", "sqlalchemy", "scipy", "pandas", "altair", "vl_convert", "jinja2", "rich")
"""Packages of Fitproof's entry points."""
TABLE = "search_table_{tiny}cuda_{model}_{date}.csv"
PIECES = (
    Piece(
        "prediction",
        "prediction_gpu.py --folder {folder} --date {date}",
        "--tiny --sample 3",
        ("prediction_{tiny}cuda_{date}.md", "prediction_{tiny}cuda_{date}.json"),
    ),
    Piece("context", "context.py --folder {folder} --date {date}", "", ("context_cuda_{date}.md",), resumes=False),
    Piece(
        "workspaces",
        "cudnn_workspaces.py --folder {folder} --date {date}",
        "",
        ("cudnn_workspaces_cuda_{date}.csv",),
        resumes=False,
    ),
    Piece(
        "claims",
        "claims.py --short --runs 3 --folder {folder} --work {work}/claims --date {date}",
        "--tiny --runs 1 --claims encoder",
        ("claims_cuda_{date}.md", "claims_cuda_{date}.csv"),
        FITPROOF,
    ),
    Piece(
        "levers",
        "levers.py --device cuda --repeats 3 --folder {folder} --date {date}",
        "--tiny --repeats 1 --variants checkpointing",
        tuple(f"levers_{{tiny}}cuda_{{model}}_{{date}}.{ending}" for ending in ("csv", "md", "png")),
        ("pandas", "altair", "vl_convert", "jinja2", "rich"),
    ),
    Piece(
        "peers",
        "peers.py --device cuda --folder {folder} --date {date}",
        "--tiny --runs 1 --num_steps 4 --configurations fp32 --peers Fitproof",
        ("peers_{tiny}cuda_{date}.md", "peers_{tiny}cuda_{date}.csv", "peers_{tiny}cuda_{date}.png"),
        ("accelerate", "lightning", "altair", "vl_convert"),
    ),
    Piece(
        "search table",
        "search_table.py --device cuda --repeats 2 --folder {folder} --date {date}",
        "--tiny --repeats 1",
        (TABLE, TABLE.replace(".csv", ".json")),
    ),
    Piece(
        "search replay",
        f"search_replay.py {{folder}}/{TABLE}",
        "--seeds 2",
        (TABLE.replace("table", "replay"), TABLE.replace("table", "replay").replace(".csv", ".md")),
        ("optuna", "scipy"),
        after="search table",
    ),
)


class State:
    """The pieces that are complete, in a file of the working folder, and the conditions of all pieces."""

    def __init__(self, file: Path, conditions: Mapping[str, Any]) -> None:
        """Read the file, or begin today.

        Raises:
            InvalidInputError: its pieces had other conditions, or it cannot be written.

        """
        self._file = file
        today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
        self._content: dict[str, Any] = {"conditions": dict(conditions), "date": today, "complete": []}
        if file.exists():
            self._content = json.loads(file.read_text())
        if self._content["conditions"] != conditions:
            raise InvalidInputError(
                f"evidence must be measured under one set of conditions, and that in {file} has "
                f"{self._content['conditions']}, not {dict(conditions)}; name another folder: --work runs/evidence_2"
            )
        self._write()

    @property
    def date(self) -> str:
        """The date in the names of all files: that of the first call."""
        return str(self._content["date"])

    def is_complete(self, name: str) -> bool:
        """Whether nothing of a piece is left."""
        return name in self._content["complete"]

    def complete(self, piece: Piece) -> None:
        """Write down that nothing of a piece is left."""
        self._content["complete"].append(piece.name)
        self._write()

    def _write(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"the working folder must be writable, and {self._file.parent} is not ({error.strerror}); "
                "name another: --work folder"
            ) from error
        write_atomically(self._file, json.dumps(self._content, indent=1).encode())


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is left until the time is over; return the exit code: 0 complete, 2, 75 something is left, 130."""
    parser = argparse.ArgumentParser(prog="python benchmarks/evidence.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; the next one goes on")
    parser.add_argument("--sample", action="store_true", help="a few rows of each piece, to try the command")
    parser.add_argument("--pieces", help="with commas between; by default all")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="where tables and plots are written")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evidence", help="where the state is kept")
    given = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    Deadline(given.minutes)
    end = time.monotonic() + 60 * given.minutes
    pieces = _chosen(given.pieces)
    device = _device()
    conditions = {"device_name": device_name(device), "torch": torch.__version__, "sample": given.sample}
    state = State(given.work.resolve() / "state.json", conditions)
    values = {
        "folder": given.folder.resolve(),
        "work": given.work.resolve(),
        "date": state.date,
        "tiny": "tiny_" if given.sample else "",
        "model": "gpt2-nano" if given.sample else "gpt2",
    }
    given.folder.mkdir(parents=True, exist_ok=True)
    notes: dict[str, str] = {}
    try:
        for piece in pieces:
            if not state.is_complete(piece.name):
                notes[piece.name] = _measured(piece, values, state, end)
    finally:
        left = [piece for piece in pieces if not state.is_complete(piece.name)]
        _show(pieces, state, values, notes)
    return len(left)


def _chosen(text: str | None) -> list[Piece]:
    names = [piece.name for piece in PIECES] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in [piece.name for piece in PIECES]:
            valid = ", ".join(piece.name for piece in PIECES)
            raise InvalidInputError(f"no piece is called {name!r}; the pieces are {valid}")
    return [piece for piece in PIECES if piece.name in names]


def _device() -> torch.device:
    if torch.cuda.device_count() == 0:
        raise InvalidInputError(
            f"evidence is measured on a GPU, and torch {torch.__version__} sees none here; run it on a machine with "
            "one, with a CUDA build of torch"
        )
    return find_device("cuda")


def _measured(piece: Piece, values: Values, state: State, end: float) -> str:
    """Run a piece until nothing of it or no time is left; return what became of it, as text."""
    absent = piece.absent()
    if absent:
        return f"needs {', '.join(absent)}, which this Python does not have"
    if piece.after is not None and not state.is_complete(piece.after):
        return f"needs {piece.after}, which is not complete"
    seconds = end - time.monotonic() - SECONDS_TO_END
    if seconds <= 0:
        return "no time left"
    print(f"== {piece.name}", flush=True)
    code = _call(piece.command(values, seconds), end - SECONDS_TO_STOP)
    if code == 0:
        state.complete(piece)
        return "complete"
    return "goes on where it stopped" if code in (UNFINISHED, INTERRUPTED) else f"failed with exit code {code}"


def _call(command: Sequence[str], end: float) -> int:
    """Run a command in a process group of its own, which is interrupted at `end` or by Ctrl-C; return its exit code."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True) as process:
        try:
            return process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return INTERRUPTED
        except KeyboardInterrupt:
            _interrupt(process)
            raise


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    """End a command as Ctrl-C does, or kill it if it does not end."""
    for kind in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
            return


def _show(pieces: Sequence[Piece], state: State, values: Values, notes: Mapping[str, str]) -> None:
    """Print what is complete, with its files, and what is left and why."""
    print("== evidence")
    for piece in pieces:
        if state.is_complete(piece.name):
            files = [name.format(**values) for name in piece.outputs]
            print(f"{piece.name}: complete, in {values['folder']}: {', '.join(files)}")
        else:
            print(f"{piece.name}: left ({notes.get(piece.name, 'not begun')})")


if __name__ == "__main__":
    sys.exit(main())
