"""Interruptions and errors at rare moments: of a run's start and end, a verification, a study and the cache."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, tiny
from mlflow import MlflowClient
from project import new_store
from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Result
from pipeline.config.experiment import Experiment
from pipeline.config.variants import load_single
from pipeline.jobs.comparison import run_comparison
from pipeline.memory.device import hardware_of
from pipeline.prediction import predict as predict_module
from pipeline.prediction.predict import predict
from pipeline.report.findings import read_findings
from pipeline.runtime.observer import Observer, Run
from pipeline.runtime.run import run
from pipeline.searching.candidates import unpredicted, with_predictions
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.tracking.job import open_job


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = new_store(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    return uri


def statuses(uri: str) -> dict[str, str]:
    client = MlflowClient(uri)
    ids = [one.experiment_id for one in client.search_experiments()]
    return {run.info.run_name: run.info.status for run in client.search_runs(ids)}


def test_ctrl_c_while_a_run_starts_leaves_no_child_running(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child run is sent before its corpus is read."""
    experiment = tiny(corpus="quick_fox")

    def interrupted(self: Experiment) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_job("main", "x", tmp_path / "runs") as job:
        monkeypatch.setattr(Experiment, "prepare", interrupted)
        run(Run(name="one", runnable=experiment, folder=job.folder / "one"), [job.children.observer()])
    assert set(statuses(store).values()) == {"KILLED"}, statuses(store)


def test_a_disk_that_is_full_at_the_start_of_a_job_leaves_no_parent_running(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise InvalidInputError("no space")

    monkeypatch.setattr("pipeline.tracking.unsent.write_result_file", full)
    with pytest.raises(InvalidInputError), open_job("main", "x", tmp_path / "runs"):
        pass
    monkeypatch.undo()
    assert "RUNNING" not in statuses(store).values(), statuses(store)


@pytest.mark.parametrize("moment", ["set_kind", "find_or_create", "Job"])
def test_ctrl_c_while_a_job_begins_leaves_no_run_that_goes_on(
    moment: str, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"pipeline.tracking.job.{moment}", interrupted)
    with pytest.raises(KeyboardInterrupt), open_job("main", "x", tmp_path / "runs"):
        pass
    assert "RUNNING" not in statuses(store).values(), statuses(store)


def test_ctrl_c_while_other_lengths_are_predicted_keeps_the_report(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.jobs.comparison._with_predictions", interrupted)
    own = {**TINY, "corpus": "quick_fox", "output": tmp_path / "runs"}
    with pytest.raises(KeyboardInterrupt):
        run_comparison(load_single("main", own), Console(quiet=True))
    assert len(list((tmp_path / "runs").glob("*/report.html"))) == 1


def test_an_error_on_fake_tensors_of_one_configuration_does_not_end_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiments = [tiny(corpus="quick_fox", micro_batch_size=size, effective_batch_size=2) for size in (1, 2)]
    choices: list[Any] = [{"micro_batch_size": 1}, {"micro_batch_size": 2}]
    real = predict_module.predict

    def fails(experiment: Experiment, *args: Any, **options: Any) -> Any:
        if experiment.micro_batch_size == 1:
            raise RuntimeError("fake tensors cannot do this")
        return real(experiment, *args, **options)

    monkeypatch.setattr(predict_module, "predict", fails)
    monkeypatch.setattr(predict_module, "run_all", lambda _, work, sent: enumerate(map(work, sent)))  # no worker
    candidates = with_predictions([*map(unpredicted, choices, experiments)], experiments)
    assert [one.predicted_bytes is None for one in candidates] == [True, False]


def run_script(script: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a process of its own, in this folder."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **variables}
    words = [sys.executable, "-c", script]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_an_edited_technique_begins_another_study(tmp_path: Path) -> None:
    """The technique is inactive in the first configuration of the space."""
    source = (Path(__file__).parent / "outside" / "recomputed_mlp.py").read_text()
    script = (
        "import json, sys; from pipeline.searching.experiment_problem import make_experiment_problem\n"
        "p = make_experiment_problem({'model': 'gpt2-nano', 'device': 'cpu', 'corpus': 'quick_fox',\n"
        "  'sequence_length': 16, 'effective_batch_size': 1, 'budget': '1GiB',\n"
        "  'space': {'micro_batch_size': [1], 'recomputed_mlp': [False, True]}})\n"
        "assert p.space.dimensions['recomputed_mlp'] == (False, True)\n"
        "print(json.dumps(p.identity, sort_keys=True))"
    )
    seen = []
    for text in (source, source + "\n# edited\n"):
        (tmp_path / "mine.py").write_text(text)
        done = run_script(script, tmp_path, FITPROOF_TECHNIQUES="mine")
        assert done.returncode == 0, done.stderr[-2000:]
        seen.append(done.stdout)
    assert seen[0] != seen[1]


def test_findings_of_the_version_before_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "findings.json").write_text(json.dumps({"kind": "SearchFindings", "entry": "search", "rows": []}))
    with pytest.raises(InvalidInputError) as error:
        read_findings(tmp_path)
    assert "give a job's folder" not in str(error.value), "it is a job's folder"


def test_a_cached_prediction_that_is_damaged_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    experiment = tiny(corpus="quick_fox", micro_batch_size=1, effective_batch_size=1)
    first = predict(experiment, hardware_of(experiment.device))
    for file in tmp_path.glob("prediction-*"):
        file.write_bytes(file.read_bytes()[:100])
    assert predict(experiment, hardware_of(experiment.device)) == first


def test_a_value_that_is_listed_twice_is_one_value() -> None:
    """Of two equal candidates the second could never be measured."""
    space = {"micro_batch_size": [1, 1, 2], "checkpointing": ["none"], "precision": ["fp32"]}
    problem = make_experiment_problem({**TINY, "budget": "1GiB", "effective_batch_size": 2, "space": space})
    assert len(problem.space.choices) == 2


@pytest.mark.slow
def test_ctrl_c_while_memory_is_predicted_prints_no_traceback(tmp_path: Path) -> None:
    """The resource tracker, which the exit functions need, is not killed."""
    script = (
        "import os, signal, sys, time, multiprocessing\n"
        "from pipeline.runtime.signals import exit_on_signal\n"
        "from pipeline.runtime.worker_pool import worker_pool, run_all\n"
        "exit_on_signal()\n"
        "with worker_pool(1) as pool:\n"
        "    for _ in run_all(pool, time.sleep, [0.0, 60.0]):\n"
        "        print('ready', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err


@pytest.mark.slow
def test_ctrl_c_between_the_fork_of_a_process_and_its_arguments_prints_no_traceback(tmp_path: Path) -> None:
    """A process that is forked without its arguments would print where it failed to read them."""
    script = (
        "import signal, sys\n"
        "from multiprocessing import forkserver\n"
        "from pathlib import Path\n"
        "from conftest import tiny\n"
        "from pipeline.runtime.run import execute\n"
        "connect = forkserver.connect_to_new_process\n"
        "def interrupted(fds):\n"
        "    ends = connect(fds)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return ends\n"
        "forkserver.connect_to_new_process = interrupted\n"
        "print(execute(tiny(corpus='quick_fox'), Path('log.txt')).outcome)\n"
    )
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted\n") and "Traceback" not in done.stderr, done.stderr


CALLED_BACK = """
import os, signal, time, weakref
from pipeline.runtime.signals import exit_on_signal, interrupt_on_signal

class Freed:
    pass

def called_back(_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

exit_on_signal()
interrupt_on_signal()
freed = Freed()
reference = weakref.ref(freed, called_back)
try:
    del freed
    print("ignored", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_in_a_callback_where_python_ignores_it_is_not_lost() -> None:
    done = run_script(CALLED_BACK, ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ignored\ninterrupted\n", "")


def test_ctrl_c_while_a_run_is_summarized_keeps_its_result(tmp_path: Path) -> None:
    class Last(Observer):
        def finished(self, result: Result, summary: Any) -> None:
            self.result = result

    def interrupted(_: Result) -> Any:
        raise KeyboardInterrupt

    last = Last()
    this = Run(name="one", runnable=tiny(corpus="quick_fox"), folder=tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        run(this, [last], summarize=interrupted)
    assert (tmp_path / "one" / "result.json").exists() and len(last.result.steps) == 4
