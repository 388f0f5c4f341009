"""The command line of benchmarks/claims.py."""

import argparse
import datetime
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from exit_code import exit_code_of

from folklore import accumulation, capacity, checkpointing, precision, together
from folklore.claim import Claim
from folklore.page import Page
from folklore.plan import PlannedCheck, in_random_order, plan
from folklore.plot import plot
from folklore.runs import Runs, require_writable
from folklore.scale import FULL, SHORT, TINY, Scale
from folklore.verdict import statements_of
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import write_atomically
from pipeline.memory.device import find_device
from pipeline.runtime.fork_server import start_server

ROOT = Path(__file__).parent.parent.parent
CLAIMS = {
    claim.name: claim for part in (precision, accumulation, checkpointing, together, capacity) for claim in part.CLAIMS
}


def main(words: Sequence[str]) -> int:
    """Measure what has not been measured, write the table, and return the exit code."""
    given = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return exit_code_of(lambda: _run(given, words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/claims.py", description=(__doc__ or ""))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--short", action="store_true", help="fewer conditions and 50 optimizer steps")
    parser.add_argument("--tiny", action="store_true", help="small models, lengths and budgets, for any machine")
    parser.add_argument("--claims", default=",".join(CLAIMS), help="those to measure, with commas between them")
    parser.add_argument("--runs", type=int, default=3, help="runs of each configuration")
    parser.add_argument("--minutes", type=float, help="begin no run after this time")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks", help="where the table is written")
    parser.add_argument("--kept", type=Path, help="where runs are kept, by default runs/claims_<device>_<form>")
    return parser


def _run(given: argparse.Namespace, words: Sequence[str]) -> None:
    claims = _chosen(given.claims)
    if given.runs < 1:
        raise InvalidInputError(f"--runs must be 1 or more, and is {given.runs}; leave it out for 3")
    if given.minutes is not None and given.minutes <= 0:
        raise InvalidInputError(f"--minutes must be more than 0, and is {given.minutes:g}; leave it out for no limit")
    deadline = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    device = _device(given.device, given.tiny)
    scale = replace(TINY if given.tiny else SHORT if given.short else FULL, device=str(device))
    require_writable(given.folder)
    runs = Runs(scale.name, given.kept or ROOT / "runs" / f"claims_{device.type}_{scale.name}")
    start_server()
    checks = plan(claims, scale, given.runs)
    todo = in_random_order(checks, runs.known())
    if todo:
        runs.measure(todo, deadline)
    command = " ".join(["python benchmarks/claims.py", *words])
    _write(checks, runs, scale, command, given.folder)


def _device(name: str, tiny: bool) -> torch.device:
    try:
        device = find_device(name)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, which here means: --device cpu --tiny") from error
    if device.type == "cpu" and not tiny:
        raise InvalidInputError("GPT-2 must be trained on a GPU, and the device is cpu; add --tiny for small models")
    return device


def _chosen(names: str) -> list[Claim]:
    for name in names.split(","):
        if name not in CLAIMS:
            raise InvalidInputError(f"no claim is called {name!r}; the claims are {', '.join(CLAIMS)}")
    return [claim for name, claim in CLAIMS.items() if name in names.split(",")]


def _write(checks: Sequence[PlannedCheck], runs: Runs, scale: Scale, command: str, folder: Path) -> None:
    """Write the table as Markdown, as CSV and as a picture, all from what MLflow keeps."""
    records = runs.records()
    statements = []
    for claim in dict.fromkeys(one.claim for one in checks):
        statements += statements_of(claim, [one.finding(records) for one in checks if one.claim is claim])
    date = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    kind = scale.device.partition(":")[0]
    stem = f"claims_{kind}_{date}"
    own = dict(pair for one in checks for pair in one.records(records))
    page = Page(
        statements=statements, records=[*own.values()], scale=scale, date=date, command=command, plot=f"{stem}.png"
    )
    contents = {"md": page.markdown().encode(), "csv": page.csv().encode(), "png": plot(statements)}
    for ending, content in contents.items():
        write_atomically(folder / f"{stem}.{ending}", content)
        print(folder / f"{stem}.{ending}")
