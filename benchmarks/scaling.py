"""What a study's storage and a tracking server do in a second, and how long a run's start and the sampler take.

    python benchmarks/scaling.py --storage postgresql+psycopg://fitproof@127.0.0.1/optuna \
        --store postgresql+psycopg://fitproof@127.0.0.1/mlflow      writes benchmarks/scaling_<date>.md
    python benchmarks/scaling.py --few                                prints fewer and smaller cells, of SQLite alone

Databases must exist; the password is in the environment (PGPASSWORD) or in ~/.pgpass. Workers are processes of this
machine, and so are the servers.
"""

import argparse
import datetime
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import optuna
from checkout import ROOT, environment_of
from mlflow.entities import Metric

from pipeline.base.results import Outcome
from pipeline.config.experiment import make_experiment
from pipeline.memory.device import find_device
from pipeline.memory.work import Work
from pipeline.runtime.environment import environment
from pipeline.runtime.ray_executor import ray_executors
from pipeline.runtime.run import execute
from pipeline.searching.acquisition import Rules
from pipeline.searching.candidates import Candidate
from pipeline.searching.sampler import PredictiveSampler
from pipeline.searching.storage import open_storage

SHOWN = ("device_name", "cores", "host_memory_mib", "system", "python", "mlflow", "optuna")
NUM_WORKERS = (1, 4, 16)
NUM_TRIALS = 48
"""Trials of a study, divided among its workers."""
NUM_PARAMETERS, NUM_ATTRIBUTES, NUM_REPORTS = 5, 10, 8
"""What a search stores of a trial."""
POINTS_IN_A_BATCH = (50, 1000)
"""What a run sends in five seconds, and the most that MLflow takes at once."""
SECONDS_OF_A_WRITER = 5.0
NUM_CONFIGURATIONS = (100, 1_000, 10_000)
NUM_MEASURED = (0, 100, 1_000)
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": tuple(2**power for power in range(10)),
    "precision": ("fp32", "bf16"),
    "checkpointing": ("none", "every_layer", "every_2_layers", "every_3_layers", "every_4_layers"),
    "loss_kernel": ("none", "chunked"),
    "optimizer": ("adamw", "sgd", "adafactor", "lion", "adamw_8bit"),
    "gelu": ("none", "fused"),
    "attention": ("sdpa", "eager", "flash", "efficient", "cudnn"),
}
"""Values whose products are NUM_CONFIGURATIONS."""
FEWEST_STEPS = {
    "device": "cpu",
    "model": "gpt2-nano",
    "corpus": "quick_fox",
    "causal_lm": {"num_layers": 1, "width": 32, "num_heads": 2},
    "vocabulary_size": 300,
    "sequence_length": 16,
    "effective_batch_size": 8,
    "num_steps": 4,
}
"""A training that takes almost no time, in as few steps as a run may have."""
NUM_LATER_STARTS = 5


def main() -> None:
    """Measure all, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--storage", help="URL of a PostgreSQL database for studies")
    parser.add_argument("--store", help="URL of a PostgreSQL database for MLflow")
    parser.add_argument("--few", action="store_true", help="to try this script out")
    given = parser.parse_args()
    num_workers = NUM_WORKERS[:2] if given.few else NUM_WORKERS
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as name, _workers(num_workers[-1]) as pool:
        folder = Path(name)
        storages = {"SQLite": f"sqlite:///{folder}/optuna.db", "PostgreSQL": given.storage}
        stores = {"SQLite": f"sqlite:///{folder}/mlflow.db", "PostgreSQL": given.store}
        tables = [
            *_of_storages(pool, {name: url for name, url in storages.items() if url}, num_workers, given.few),
            *_of_stores(pool, {name: url for name, url in stores.items() if url}, num_workers, given.few, folder),
            *_of_starts(folder),
            *_of_asks(given.few),
        ]
    today = f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    about = environment(find_device("cpu"))
    lines = [
        f"# Storage, tracking server and sampler with several workers, {today}",
        "",
        "Written by `python benchmarks/scaling.py`. Workers and servers share this machine's cores.",
        "",
        *_table(("what", "value"), [*((name, about[name]) for name in SHOWN if name in about), ("load before", load)]),
        *tables,
    ]
    text = "\n".join(lines)
    print(text)
    if not given.few:
        (ROOT / "benchmarks" / f"scaling_{today}.md").write_text(text)


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Give processes that have imported this module."""
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        list(pool.map(time.sleep, [2.0] * count))
        yield pool


def _speed(pool: ProcessPoolExecutor, work: Callable[[float], tuple[int, bool]], count: int, form: str) -> str:
    """Return how much `count` workers did in a second at the same time, and how many of them failed, as text."""
    start_at = time.time() + 1
    parts = list(pool.map(work, [start_at] * count))
    speed = sum(done for done, _ in parts) / (time.time() - start_at)
    num_failed = sum(failed for _, failed in parts)
    return f"{speed:{form}}" + (f" ({num_failed} failed)" if num_failed else "")


def _of_storages(
    pool: ProcessPoolExecutor, urls: dict[str, str], num_workers: Sequence[int], few: bool
) -> Iterator[str]:
    rows = []
    for name, url in urls.items():
        speeds = []
        for count in num_workers:
            study = f"scaling {uuid.uuid4()}"
            optuna.create_study(storage=open_storage(url), study_name=study, direction="maximize")
            each = (16 if few else NUM_TRIALS) // count
            speeds.append(_speed(pool, partial(_store_trials, url, study, each), count, ",.1f"))
            optuna.delete_study(storage=open_storage(url), study_name=study)
            print(f"{name}, {count} workers: {speeds[-1]} trials/s", flush=True)
        rows.append((name, *speeds))
    yield from ("## Trials a second", "")
    yield (
        f"Trials that train nothing and store what a search stores: {NUM_PARAMETERS} parameters, {NUM_ATTRIBUTES} "
        f"attributes, {NUM_REPORTS} intermediate values, a heartbeat and the result; {NUM_TRIALS} trials for each "
        "number of workers. A worker of SQLite fails if the file is locked for longer than 20 seconds."
    )
    yield ""
    yield from _table(("storage", *map(_workers_of, num_workers)), rows)


def _store_trials(url: str, name: str, count: int, start_at: float) -> tuple[int, bool]:
    """Store `count` trials in a study; return how many were stored, and whether the storage failed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_storage(url, heartbeat_interval=10, grace_period=60)
    study = optuna.load_study(storage=storage, study_name=name, sampler=optuna.samplers.RandomSampler())

    def store(trial: optuna.Trial) -> float:
        for number in range(NUM_PARAMETERS):
            trial.suggest_categorical(f"parameter {number}", [0, 1, 2, 3])
        for number in range(NUM_ATTRIBUTES):
            trial.set_user_attr(f"attribute {number}", number)
        for step in range(NUM_REPORTS):
            trial.report(1.0, step)
        return 1.0

    time.sleep(max(0.0, start_at - time.time()))
    stored = itertools.count()
    try:
        study.optimize(store, n_trials=count, callbacks=[lambda *_: next(stored)])
    except Exception:  # SQLite: another worker has locked the file for longer than SECONDS_FOR_A_LOCK
        return next(stored), True
    return next(stored), False


def _of_stores(
    pool: ProcessPoolExecutor, urls: dict[str, str], num_workers: Sequence[int], few: bool, folder: Path
) -> Iterator[str]:
    rows = []
    for name, url in urls.items():
        with _server(url, folder) as address:
            experiment = mlflow.MlflowClient(address).create_experiment(f"scaling {uuid.uuid4()}")
            for size in POINTS_IN_A_BATCH:
                seconds = 2.0 if few else SECONDS_OF_A_WRITER
                speeds = []
                for count in num_workers:
                    speeds.append(_speed(pool, partial(_write, address, experiment, size, seconds), count, ",.0f"))
                    print(f"{name}, {count} writers, batches of {size}: {speeds[-1]} points/s", flush=True)
                rows.append((name, str(size), *speeds))
    yield from ("## Metric points a second", "")
    yield (
        "Points that an MLflow server with its default of 4 workers accepts; each writer has a run of its own and "
        "sends one batch after the other."
    )
    yield ""
    yield from _table(("backend store", "points in a batch", *map(_writers_of, num_workers)), rows)


def _write(address: str, experiment: str, size: int, seconds: float, start_at: float) -> tuple[int, bool]:
    """Log batches of points to a new run for so many seconds; return the number of points, and that none failed."""
    client = mlflow.MlflowClient(address)
    run = client.create_run(experiment).info.run_id
    time.sleep(max(0.0, start_at - time.time()))
    points = 0
    while time.time() < start_at + seconds:
        now = int(time.time() * 1000)
        client.log_batch(run, metrics=[Metric(f"m{number % 10}", 1.0, now, points + number) for number in range(size)])
        points += size
    return points, False


@contextmanager
def _server(url: str, folder: Path) -> Iterator[str]:
    """Give the address of an MLflow server with this backend store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MLFLOW_BACKEND_STORE_URI": url, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    environment_of_server = {**environment_of(folder), **variables}
    with (
        (folder / "server.txt").open("ab") as log,
        subprocess.Popen(words, cwd=folder, env=environment_of_server, stdout=log, stderr=log) as server,
    ):
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:  # noqa: S310  an address of this machine
            return bool(answer.status == 200)
    except OSError:
        return False


def _of_starts(folder: Path) -> Iterator[str]:
    experiment, rows = make_experiment(FEWEST_STEPS, "main"), []
    with ray_executors(None, experiment.device, 1, 1, threading.Event()) as [as_task]:
        for name, executor in {"child process of the search": execute, "Ray task": as_task}.items():
            times = []
            for number in range(1 + NUM_LATER_STARTS):
                start = time.perf_counter()
                result = executor(experiment, folder / "log.txt", ())
                times.append(time.perf_counter() - start)
                assert result.outcome is Outcome.OK, f"run {number}: {result.detail}"
            rows.append((name, f"{times[0]:.2f}", f"{statistics.median(times[1:]):.2f}"))
            print(f"{name}: {rows[-1][1]} s, then {rows[-1][2]} s", flush=True)
    yield from ("## Seconds of a run that trains for four steps", "")
    yield (
        f"Of a model of some thousand parameters, so nearly all is the start: the first run, and the median of "
        f"{NUM_LATER_STARTS} later ones. The first run waits until a process has imported torch and transformers."
    )
    yield ""
    yield from _table(("where", "first run", "later runs"), rows)


def _of_asks(few: bool) -> Iterator[str]:
    rows = []
    for size in NUM_CONFIGURATIONS[: 1 if few else None]:
        candidates = _candidates(size)
        cells = []
        for measured in NUM_MEASURED:
            cells.append(_seconds_of_an_ask(candidates, measured) if measured < size else "")
            print(f"{size:,} configurations, {measured:,} trials: {cells[-1] or 'all measured'}", flush=True)
        rows.append((f"{size:,}", *cells))
    yield from ("## Seconds of an ask of the predictive sampler", "")
    yield (
        "Processor time of all threads, median of 3, on made-up configurations of 3, 5 or 7 dimensions; empty where "
        "all are measured."
    )
    yield ""
    yield from _table(("configurations", *(f"{count:,} trials" for count in NUM_MEASURED)), rows)


def _candidates(count: int) -> list[Candidate]:
    """Return `count` made-up configurations."""
    names = list(DIMENSIONS)
    while np.prod([len(DIMENSIONS[name]) for name in names]) > count:
        names.pop()
    choices = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(DIMENSIONS[name] for name in names))
    ]
    assert len(choices) == count
    return [_candidate(choice) for choice in choices]


def _candidate(choice: dict[str, Any]) -> Candidate:
    size, kind = choice["micro_batch_size"], {"fp32": "float32", "bf16": "bfloat16"}[choice["precision"]]
    recomputed = 1 + DIMENSIONS["checkpointing"].index(choice["checkpointing"]) / 10
    peak = int(size * 2**20 * (8 if choice["checkpointing"] == "none" else 4))
    return Candidate(
        choice=choice,
        micro_batch_size=size,
        num_passes=512 // size,
        num_tokens=512 * 256,
        pass_work=Work({kind: size * 1e9 * recomputed}, moved_bytes=size * 1e7, num_kernels=1000),
        update_work=Work(moved_bytes=1e8),
        predicted_bytes=peak,
    )


def _seconds_of_an_ask(candidates: Sequence[Candidate], num_measured: int) -> str:
    """Return the time from a study with so many measured configurations to the next proposal."""
    sampler, random = PredictiveSampler(candidates, Rules(budget_bytes=2**40)), np.random.default_rng(0)
    study = optuna.create_study(direction="maximize")
    for number in random.permutation(len(candidates))[:num_measured]:
        one = candidates[number]
        speed = one.num_tokens / (one.num_passes * (0.3 + one.pass_work.flops / 1e10)) * random.normal(1, 0.02)
        distributions = {name: optuna.distributions.CategoricalDistribution(DIMENSIONS[name]) for name in one.choice}
        study.add_trial(optuna.create_trial(params=dict(one.choice), distributions=distributions, value=float(speed)))
    times = []
    for _ in range(3):
        start = time.process_time()
        sampler.evaluate(study)
        times.append(time.process_time() - start)
    return f"{statistics.median(times):.3g}"


def _workers_of(count: int) -> str:
    return f"{count} worker{'s' * (count > 1)}"


def _writers_of(count: int) -> str:
    return f"{count} writer{'s' * (count > 1)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    main()
