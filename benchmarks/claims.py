"""Common claims about training memory, checked by running the project's entry points; the claims are in claims.yaml.

    python benchmarks/claims.py                            on a GPU, the long form
    python benchmarks/claims.py --short                    on a GPU, in minutes
    python benchmarks/claims.py --device cpu --tiny        the same claims on small models, anywhere
    python benchmarks/claims.py --claims precision,cards   some of the claims

Writes benchmarks/claims_<device>_<date>.md and .csv. Each command runs once for each seed, in random order, and its
results stay in the working folder: interrupted, the same command continues where it stopped.
"""

import argparse
import datetime
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch
from claims_evaluation import NotMeasuredError, Row
from claims_page import page
from claims_spec import Check, Claims, checks_of, read_claims
from exit_code import Deadline, exit_code_of
from mlflow import MlflowClient

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.base.results import Outcome
from pipeline.memory.device import find_device
from pipeline.runtime.environment import environment

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".yaml")
RETRIED = (Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.INTERRUPTED)
"""Outcomes after which a command is run again."""
NOT_RUN_YET = "not run yet"
CONDITIONS = ("device_name", "torch", "transformers", "cuda", "allocator")
"""What a measurement depends on besides its command; if one of these changes, it is repeated."""


class Commands:
    """The entry points' commands, each with its results in a folder of its own below the working folder."""

    def __init__(self, folder: Path, device: torch.device, settings: str, deadline: Deadline) -> None:
        self._folder, self._device, self._settings = folder, device, settings
        self._deadline = deadline
        about = environment(device)
        self._conditions = [about.get(name) for name in CONDITIONS] + [torch.get_num_threads()]

    def run(self, todo: Sequence[tuple[str, int]]) -> None:
        """Run commands with their seeds, those without results that stay; begin none after the deadline."""
        todo = [(command, seed) for command, seed in todo if not self._is_measured(command, seed)]
        for place, (command, seed) in enumerate(todo, 1):
            if self._deadline.is_over:
                return
            start = time.monotonic()
            ended = self._run(command, seed)
            print(f"{place} of {len(todo)}: {command}: {ended} in {time.monotonic() - start:.0f} s", flush=True)

    def rows(self, command: str, seed: int) -> list[Row]:
        """Return the rows of a command's findings; raise NotMeasuredError, with the reason, if there are none."""
        folder = self._folder_of(command, seed)
        for file in folder.rglob("findings.json"):
            findings = json.loads(file.read_text())
            return findings["rows"] if "rows" in findings else findings["cards"][0]["rows"]
        error = folder / "error.txt"
        raise NotMeasuredError(error.read_text() if error.exists() else NOT_RUN_YET)

    def row(self, run: str, seed: int) -> Row:
        """Return the row that ` @ comparison/variant` names, or the only one."""
        command, _, name = run.partition(" @ ")
        for row in self.rows(command, seed):
            if name in ("", f"{row['comparison']}/{row['name']}"):
                return row
        raise NotMeasuredError(f"no row {name}")

    def predict(self, command: str) -> list[Row]:
        """Return the planned rows of a `plan` command, which is run if it was not."""
        self.run([(command, 0)])
        return self.rows(command, 0)

    @cached_property
    def _store(self) -> Mapping[str, str]:
        """The environment variables by which runs are tracked in the working folder, not in the user's store."""
        store, name = f"sqlite:///{self._folder}/mlflow.db", "claims"
        client = MlflowClient(store)
        if client.get_experiment_by_name(name) is None:
            client.create_experiment(name, (self._folder / "artifacts").as_uri())
        return {"MLFLOW_TRACKING_URI": store, "MLFLOW_EXPERIMENT_NAME": name}

    def _folder_of(self, command: str, seed: int) -> Path:
        key = json.dumps([command, self._settings, seed, str(self._device), self._conditions])
        return self._folder / hashlib.sha256(key.encode()).hexdigest()[:12]

    def _is_measured(self, command: str, seed: int) -> bool:
        try:
            rows = self.rows(command, seed)
        except NotMeasuredError:
            return False
        return all(not row.get("result") or row["result"]["outcome"] not in RETRIED for row in rows)

    def _run(self, command: str, seed: int) -> str:
        """Run a command, keep its results or its error, and return the outcomes of its runs as text."""
        kept = self._folder_of(command, seed)
        unfinished = kept.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        words = [*shlex.split(command), "--output", str(unfinished)]
        if words[0] != "plan":
            words += [*shlex.split(self._settings), "--device", str(self._device), "--seed", str(seed)]
        done = subprocess.run(
            [sys.executable, "-m", "fitproof", *words],
            cwd=ROOT,
            env={**os.environ, **self._store},
            capture_output=True,
            text=True,
            check=False,
        )
        if not any(unfinished.rglob("findings.json")):
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            error = next((line for line in lines if line.startswith("error: ")), lines[-1])
            (unfinished / "error.txt").write_text(error.removeprefix("error: "))
        shutil.rmtree(kept, ignore_errors=True)
        unfinished.rename(kept)
        try:
            rows = self.rows(command, seed)
        except NotMeasuredError as reason:
            return str(reason)
        counts = Counter(row["result"]["outcome"] if row.get("result") else "skipped" for row in rows)
        return "planned" if words[0] == "plan" else ", ".join(f"{count} {name}" for name, count in counts.items())


def main(words: Sequence[str]) -> int:
    """Measure what is missing, write the page and the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python benchmarks/claims.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--short", action="store_const", const="short", dest="form", help="fewer conditions and steps")
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="form", help="small models, for any machine")
    parser.add_argument("--claims", help="those to measure, with commas between them; by default all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command, each with its own seed")
    parser.add_argument("--minutes", type=float, help="begin no command after this many minutes")
    parser.add_argument("--date", default=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", help="of the files")
    parser.add_argument("--folder", type=Path, default=FILE.parent, help="where the page and the table are written")
    parser.add_argument("--work", type=Path, help="where results are kept, by default runs/claims_<device>_<form>")
    given = parser.parse_args(words)
    given.command = shlex.join(["python", "benchmarks/claims.py", *words])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_code_of(lambda: _measure(given))


def _measure(given: argparse.Namespace) -> int:
    claims, form = read_claims(FILE), given.form or "full"
    names = given.claims.split(",") if given.claims else list(claims.claims)
    for name in names:
        if name not in claims.claims:
            raise InvalidInputError(f"no claim is called {name!r}; the claims are {', '.join(claims.claims)}")
    if given.runs < 1:
        raise InvalidInputError(f"--runs must be 1 or more, and is {given.runs}; leave it out for 3")
    deadline = Deadline(given.minutes)
    device = _device(given.device, form)
    for folder in (given.folder, work := given.work or ROOT / "runs" / f"claims_{device.type}_{form}"):
        _require_writable(folder)
    commands = Commands(work.resolve(), device, claims.settings, deadline)
    checks = [check for name in names for check in checks_of(claims, name, form, commands.predict)]
    commands.run(_in_random_order(checks, given.runs))
    return _write(checks, claims, commands, given, device)


def _device(name: str, form: str) -> torch.device:
    try:
        device = find_device(name)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, which here means: --device cpu --tiny") from error
    if device.type == "cpu" and form != "tiny":
        raise InvalidInputError("GPT-2 must be trained on a GPU, and the device is cpu; add --tiny for small models")
    return device


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"results must be written to a folder that can be, and {folder} cannot ({error.strerror}); "
            "name another with --folder and --work"
        ) from error


def _in_random_order(checks: Sequence[Check], num_seeds: int) -> list[tuple[str, int]]:
    """Return every command with every seed, all of one seed before the next."""
    commands = list(dict.fromkeys(run.partition(" @ ")[0] for check in checks for run in check.runs))
    return [(name, seed) for seed in range(num_seeds) for name in random.Random(seed).sample(commands, len(commands))]  # noqa: S311


def _write(
    checks: Sequence[Check], claims: Claims, commands: Commands, given: argparse.Namespace, device: torch.device
) -> int:
    """Write the page and the table; return the number of checks that lack runs."""
    used: dict[tuple[str, int], Row] = {}
    lines, num_incomplete = [], 0
    for check in checks:
        rounds: list[list[Row] | NotMeasuredError] = []
        for seed in range(given.runs):
            try:
                if check.reason is not None:
                    raise NotMeasuredError(check.reason)
                rows = {(run, seed): commands.row(run, seed) for run in check.runs}
                used |= rows
                rounds.append(list(rows.values()))
            except NotMeasuredError as error:
                rounds.append(error)
        lines.append(check.evaluate(rounds))
        num_incomplete += any(str(one) == NOT_RUN_YET for one in rounds)
    table = pd.DataFrame(lines)
    about = {**environment(device), "threads": str(torch.get_num_threads()), "date": given.date}
    form = given.form or "full"
    origin = f"Written by `{given.command}`."
    if num_incomplete:
        origin += f" {num_incomplete} of {len(lines)} checks lack runs: the same command continues."
    text = page(table, claims, form, [(run, row) for (run, _), row in used.items()], about, origin)
    for ending, content in {"md": text, "csv": table.to_csv(index=False, float_format="%.6g")}.items():
        file = given.folder / f"claims_{device.type}_{given.date}.{ending}"
        write_atomically(file, content.encode())
        print(file)
    return num_incomplete


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
