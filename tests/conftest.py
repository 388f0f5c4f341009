"""What the tests share: a folder and a tracking store of their own, and settings that train in a second."""

import gc
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import hypothesis
import optuna
import pytest
import torch
import vl_convert
from filelock import FileLock

from pipeline.base.contracts import Hardware
from pipeline.base.results import StepRecord
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.given import merged, nested
from pipeline.runtime.observer import Observer

ROOT = Path(__file__).parent.parent
hypothesis.settings.register_profile("without a time limit", deadline=None)  # times vary with other load
hypothesis.settings.load_profile("without a time limit")

TINY: dict[str, Any] = {
    "device": "cpu",
    "model": "gpt2-nano",
    "num_steps": 4,
    "sequence_length": 32,
    "vocabulary_size": 512,
    "causal_lm": {"num_layers": 2, "width": 32, "num_heads": 2},
    "encoder_stack": {"num_layers": 2, "width": 32, "num_heads": 2},
    "random_vectors": {"num_sequences": 16},
}
OWN = {"model": "experiments.examples.own:build_model", "corpus": "experiments.examples.own:read_corpus"}
"""A model and a corpus that functions of one's own return, named from the root of the repository."""


CPU = Hardware(kind="cpu", name="a CPU", memory_bytes=2**34, capability=None, num_multiprocessors=None)
THREE_LEVERS: dict[str, Any] = {
    "micro_batch_size": "divisors",
    "checkpointing": ["none", "every_layer", "every_2_layers"],
    "precision": ["fp32", "bf16"],
}
"""A space of a few configurations."""
DIVISIBLE: dict[str, Any] = {"model": "qwen3-nano", "causal_lm": {"num_layers": 2, "width": 32, "num_heads": 4}}
"""A model whose heads two ranks divide, with norms of heads."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
"""The browser in which pages are tested."""
FOUR_RANKS = (pytest.mark.slow, pytest.mark.four_ranks)
"""Marks of a case that trains in four processes."""
DRAWN_IN = ("test_report", "test_search", "test_lever_benchmark", "test_peers")
"""Files whose tests draw plots; so do all commands that run in processes of their own."""
PNG = b"\x89PNG\r\n\x1a\n"
IS_SIMULATED = "SIMULATED_CARD_NAME" in os.environ
"""Whether this process runs on a simulated card: see pipeline/simulation/README.md."""
EACH_CARD = ("h200", "a100", "rtx4090", "t4") if IS_SIMULATED else (None,)
"""The cards of tests that depend on the card; None: this machine's own."""
LONGEST = (
    *("cuda_entry_points", "cuda_faults", "simulation_values_cuda", "data_parallel_cuda", "simulation_cuda"),
    *("cuda_without_gpu", "cuda_budget", "cuda_predictions"),
    *("entry_points", "simulate", "faults", "export", "worker_pool", "search_faults", "search_command"),
    *("explain", "docs", "fit_callback", "api", "gpu_memory", "export_trl", "ui", "levers", "simulated_ranks", "qlora"),
    *("compare", "prediction", "comparison_noise", "user_functions", "lengths"),
    *("prediction_cuda", "adapter", "check", "acquisition"),
)
"""Files of tests that take longest, by what follows `test_`; the first makes what others share."""


pytest.register_assert_rewrite("card_projects", "simulated_programs", "trainings")


def pytest_configure() -> None:
    """Take Ctrl-C, which a shell's background job ignores, and so would every process that a test interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """Let pytest find what is left after all tests: see imported_modules_are_no_garbage()."""
    gc.unfreeze()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the path of a module `own_code` in the current folder, which is removed from sys.modules after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "own_code.py"


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the path of a script in the current folder, which is one of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that processes end together; skip what the device cannot do."""
    turns = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path.stem, len(turns)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("needs_numbers") and IS_SIMULATED:
            item.add_marker(pytest.mark.skip(reason="needs numbers: a simulated card computes none"))
    _leave_out_of_matrices(items)


def _leave_out_of_matrices(items: Sequence[pytest.Item]) -> None:
    """Mark as slow all cases of a matrix but as many as it says, which lie evenly between the first and the last."""
    matrices: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix and not any(map(item.get_closest_marker, ("skip", "slow"))):
            matrices.setdefault((item.nodeid.partition("[")[0], *matrix.args), []).append(item)
    for (_, number), cases in matrices.items():
        kept = {round(place * (len(cases) - 1) / max(1, number - 1)) for place in range(number)}
        for place, case in enumerate(cases):
            if place not in kept:
                case.add_marker(pytest.mark.slow)


def pairs(firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """Return every pair as a test case; only `make test-all` runs those with neither one's first value."""
    return [
        pytest.param(first, second, id=f"{first}-{second}", marks=[pytest.mark.slow] if row and column else [])
        for row, first in enumerate(firsts)
        for column, second in enumerate(seconds)
    ]


def own_cache(folder: Path) -> Path:
    """Return the folder as a cache of its own that has the session's environment of simulated cards."""
    folder.mkdir(exist_ok=True)
    (folder / "simulated_card").symlink_to(Path(os.environ["FITPROOF_CACHE"]) / "simulated_card")
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep prepared tokens of one test session together, away from the user's own; workers share compiled libraries."""
    before = os.environ.get("FITPROOF_CACHE")
    folder = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "simulated_card"
    shared.mkdir(exist_ok=True)
    (folder / "simulated_card").symlink_to(shared)
    with suppress(FileExistsError):  # another worker's
        (shared / f"torch-{version('torch').partition('+')[0]}").symlink_to(ROOT / ".venv-cuda")
    os.environ["FITPROOF_CACHE"] = str(folder)
    yield
    os.environ.pop("FITPROOF_CACHE")
    if before is not None:
        os.environ["FITPROOF_CACHE"] = before


@pytest.fixture(scope="module", autouse=True)
def imported_modules_are_no_garbage() -> None:
    """Let the garbage collector leave out what is there: to look through all modules takes it up to a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plots_are_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile plots and do not draw them, which takes a fifth of a job's time."""

    def compiled(spec: Any, *, vl_version: str, ppi: int) -> bytes:
        vl_convert.vegalite_to_vega(spec, vl_version=vl_version)
        return PNG

    if request.path.stem not in DRAWN_IN:
        monkeypatch.setattr(vl_convert, "vegalite_to_png", compiled)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Give a browser, which takes a second to start."""
    from playwright.sync_api import sync_playwright

    without = ("background-networking", "component-update", "gpu", "quic", "sync")
    words = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in without)]
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=words)


@pytest.fixture(scope="session")
def card() -> Any:
    """Give what predicts and runs configurations on the card of this process, a simulated H200."""
    if not IS_SIMULATED:
        pytest.skip("needs simulated cards: make test-cuda")
    from simulated_run import answer  # of benchmarks/, which imports what few tests need

    return SimpleNamespace(ask=answer)


class OnCard(Protocol):
    """Runs .venv-cuda's Python, with these words, on a machine with simulated cards of one model."""

    def __call__(
        self, card: str, *words: str, num_devices: int = 1, values: bool = False, **variables: str
    ) -> "subprocess.CompletedProcess[str]": ...


def _of_the_card(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those variables of a test that change the simulated machine."""
    return {name: value for name, value in variables.items() if name.startswith(("SIMULATED_CARD_", "CUDA_"))}


@pytest.fixture
def on_card() -> OnCard:
    """Give a function that runs a process on simulated cards to its end."""
    if not IS_SIMULATED:
        pytest.skip("needs simulated cards: make test-cuda")
    from cards import environment_of  # pytest finds it, and not each process that imports this module

    def run(
        card: str, *words: str, num_devices: int = 1, values: bool = False, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        base = {**os.environ, **variables}
        environment = {**base, **environment_of(card, num_devices, base, values), **_of_the_card(variables)}
        return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a .jsonl file of documents of 1 to 40 words: some shorter, some longer than a tiny sequence."""
    chance = random.Random(0)
    syllables = [first + second for first in "bdfklmnprst" for second in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(400)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]  # some words are frequent, as in any language
    documents = [" ".join(chance.choices(words, weights, k=1 + number * 7 % 40)) for number in range(300)]
    file = tmp_path_factory.mktemp("text") / "short.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return file


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Any]:
    """Give a running PostgreSQL server; a test that stops it starts it again."""
    from servers import running_postgresql  # it needs what few tests need

    with running_postgresql() as server:
        yield server


@pytest.fixture
def database_url(postgresql: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the URL of an empty database of PostgreSQL, whose password is in the environment."""
    for name, value in postgresql.environment.items():
        monkeypatch.setenv(name, value)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url: str = postgresql.url(postgresql.new_database())
    return url


@pytest.fixture
def proxy(postgresql: Any) -> Iterator[Any]:
    """Give a network to the server of PostgreSQL."""
    from servers import proxy_to

    with proxy_to(postgresql.port) as network:
        yield network


@pytest.fixture(scope="module")
def server(postgresql: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give a tracking server of MLflow that keeps its runs in PostgreSQL."""
    from servers import MlflowServer

    store = postgresql.url(postgresql.new_database())
    server = MlflowServer(tmp_path_factory.mktemp("server"), store, environment=postgresql.environment)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a project in which every entry point has run, and what each printed; tests in parallel share it."""
    from finished import finish  # it needs what this module defines

    if "PYTEST_XDIST_WORKER" not in os.environ:
        return finish(tmp_path_factory.mktemp("finished"))
    shared = tmp_path_factory.getbasetemp().parent
    with FileLock(shared / "finished.lock"):
        kept = shared / "finished.pickle"
        if not kept.exists():
            kept.write_bytes(pickle.dumps(finish(shared / "finished")))
        return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give a copy of the project, which the tests of a file share."""
    from project import Project  # it needs what this module defines

    return Project.copy(tmp_path_factory.mktemp("project"))


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make what waits for the GPU an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, and says so after it is set
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tiny(**changes: Any) -> Experiment:
    """Return a tiny experiment with these settings; a double underscore stands for a dot."""
    return make_experiment(merged(TINY, nested({k.replace("__", "."): v for k, v in changes.items()})), "main")


class Received(Observer):
    """The optimizer steps and messages that an observer received."""

    def __init__(self, on_step: Callable[[StepRecord], None] = lambda record: None) -> None:
        self.steps: list[StepRecord] = []
        self.messages: list[Any] = []
        self._on_step = on_step

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)
        self._on_step(record)

    def message(self, message: Any) -> None:
        self.messages.append(message)


def with_corpus_of(model: str) -> Mapping[str, Any]:
    """Return the settings that make `model` train on something that suits it."""
    return {"model": model, **({"corpus": "random_vectors"} if model == "encoder_stack" else {})}
