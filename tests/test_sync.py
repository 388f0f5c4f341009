"""Nothing measured gets lost: what MLflow does not take is kept on disk, and sent later, once."""

import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from project import SMALL, Project, as_words
from test_faults import free_port, started, wait_for

from pipeline.cli import main
from pipeline.tracking.journal import NAME, Start
from pipeline.tracking.outbox import KEY, Outbox, is_refusal, now
from pipeline.tracking.store import lasting

JOB = "20260101-120000-main-abcdefgh"
LONG = {**SMALL, "num_steps": "1000000"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    """Give the client of a store of its own."""
    return MlflowClient(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


@pytest.fixture
def experiment_id(client: MlflowClient, tmp_path: Path) -> str:
    """Give an experiment of the test's own."""
    return str(client.create_experiment(tmp_path.name, artifact_location=str(tmp_path / "artifacts")))


def leave(output: Path, name: str, uri: str, experiment_id: str) -> Outbox:
    """Begin a run, measure, and end it, without sending anything."""
    folder = output / JOB / name
    folder.mkdir(parents=True)
    start = Start(uri=uri, experiment_id=experiment_id, name=name, tags={"technique": "main"}, time=now(), key=name)
    outbox = Outbox.begin(folder, start)
    (folder / "result.json").write_text("{}")
    outbox.add("params", values={"seed": "0"})
    outbox.add("dataset", name="text", digest="abc", source="{}", profile="{}")
    for step in range(400):
        values = {"loss": 1 / (step + 1), "seconds": 0.1, "tokens_per_second": 1e5}
        outbox.add("metrics", values=values, step=step, time=now() + step)
    outbox.add("file", name="result.json", artifact_path=None)
    outbox.add("tags", values={"outcome": "ok"})
    outbox.add("end", status="FINISHED", time=now())
    return outbox


def state(client: MlflowClient, experiment_id: str) -> list[tuple[Any, ...]]:
    """Return all that MLflow knows of the runs of an experiment."""
    runs: list[Run] = sorted(client.search_runs([experiment_id]), key=lambda run: str(run.info.run_name))
    return [
        (
            run.info.to_proto().SerializeToString(),
            run.data.params,
            run.data.tags,
            history(client, run),
            [item.path for item in client.list_artifacts(run.info.run_id)],
            [(i.dataset.name, i.dataset.digest) for i in run.inputs.dataset_inputs],
        )
        for run in runs
    ]


def history(client: MlflowClient, run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return each metric's points, as step and value, by the metric's name."""
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(point.step, point.value) for point in found] for name, found in points.items()}


def test_what_was_left_arrives_once_however_often_it_is_sent(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs"
    assert not leave(output, "one", client.tracking_uri, experiment_id).close()
    journal = output / JOB / "one" / NAME
    content = journal.read_bytes()
    assert main(["sync", "--output", str(output)]) == 0
    assert "405 of 405 records sent" in capsys.readouterr().out
    assert not journal.exists()
    once = state(client, experiment_id)
    [(_, params, tags, points, files, datasets)] = once
    assert params == {"seed": "0"} and files == ["result.json"] and datasets == [("text", "abc")]
    assert (tags["outcome"], tags[KEY]) == ("ok", "one")
    assert points["loss"] == [(step, 1 / (step + 1)) for step in range(400)]

    for again in (content, content + b'{"sent": [0, 1, 2]}\n'):
        journal.write_bytes(again)
        assert main(["sync", "--output", str(output)]) == 0
        assert state(client, experiment_id) == once


def test_a_damaged_journal_is_reported_and_all_else_is_sent(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken", "headless", "whole"):
        leave(tmp_path, name, client.tracking_uri, experiment_id).close()
    broken, headless = (tmp_path / JOB / name / NAME for name in ("broken", "headless"))
    lines = broken.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5][:20] + b"\xff\x00" + lines[5][30:]
    broken.write_bytes(b"".join(lines))
    headless.write_bytes(b"\x00" * 100 + headless.read_bytes()[100:])
    assert main(["sync", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "404 of 404 records sent" in said[0] and f"{broken} is damaged in line 6" in said[0]
    assert f"{headless} is damaged in line 1" in said[1]
    assert "405 of 405 records sent" in said[2]
    assert [len(points["loss"]) for _, _, _, points, _, _ in state(client, experiment_id)] == [399, 400]
    assert broken.exists() and headless.exists() and not (tmp_path / JOB / "whole" / NAME).exists()
    assert main(["sync", "--output", str(tmp_path)]) == 1
    assert "0 of 0 records sent" in capsys.readouterr().out
    assert len(state(client, experiment_id)) == 2


def test_a_run_whose_creation_was_not_answered_is_not_created_twice(
    client: MlflowClient, experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    create = client.create_run

    def lose_the_answer(*args: Any) -> None:
        create(*args)
        create(*args)  # as MLflow's own retries do
        raise mlflow.MlflowException("API request failed with timeout exception")

    monkeypatch.setattr(client, "create_run", lose_the_answer)
    trouble = outbox.send(client)
    assert trouble is not None and not is_refusal(trouble)
    assert len(outbox) == 405
    monkeypatch.undo()
    assert outbox.send(client) is None
    assert outbox.close()
    [(_, _, _, points, _, _)] = state(client, experiment_id)
    assert len(points["loss"]) == 400


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    outbox.add("params", values={"seed": "1"})  # a param never changes
    outbox.close()
    assert main(["sync", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "405 of 406 records sent" in said and f"delete {tmp_path / JOB / 'one' / NAME} to leave it so" in said
    [run] = client.search_runs([experiment_id])
    assert run.info.status == "FINISHED"


def test_a_journal_in_use_is_left_alone(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    assert main(["sync", "--output", str(tmp_path)]) == 0
    assert "left to the process that is sending it" in capsys.readouterr().out
    assert not client.search_runs([experiment_id])
    outbox.close()


def test_a_server_that_is_broken_is_asked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Broken(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("one", "two"):
            leave(tmp_path, name, f"http://127.0.0.1:{server.server_port}", "1").close()
        assert main(["sync", "--output", str(tmp_path)]) == 1
        server.shutdown()
    assert len(asked) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("0 of 405 records sent" in line and "503" in line for line in said)
    assert all("repeat this when it is back" in line for line in said)


def test_no_password_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert lasting("postgresql://me:secret@host/runs") == "postgresql://me@host/runs"
    assert lasting("https://host:5000") == "https://host:5000"
    monkeypatch.chdir(tmp_path)
    assert lasting("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert lasting(f"sqlite:///{tmp_path}/mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a project whose artifact store is a disk of 64 KiB."""
    disk = Project.copy(tmp_path).folder / "mlruns"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let us mount a small disk: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_files_that_find_the_disk_full_are_kept_and_sent_once_there_is_room(small_disk: Path) -> None:
    project = Project(small_disk.parent)
    done = project.pipeline("main", SMALL)
    assert done.returncode == 0 and "peak MiB" in done.stdout, done.stderr
    assert "No space left on device" in done.stderr and "python -m pipeline sync" in done.stderr
    parent = project.parent_of("main")
    [child] = project.children_of(parent).values()
    assert (parent.info.status, child.info.status, child.data.metrics["loss"] > 0) == ("FINISHED", "FINISHED", True)
    full = project.call("python", "-m", "pipeline", "sync")
    assert full.returncode == 1 and "No space left on device" in full.stdout

    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    room = project.call("python", "-m", "pipeline", "sync")
    assert room.returncode == 0, room.stdout
    [job] = (project.folder / "runs").iterdir()
    for run, folder, names in [
        (parent, job, ("comparison.csv", "environment.json")),
        (child, job / "single-fp32", ("config.yaml", "result.json")),
    ]:
        stored = small_disk / run.info.experiment_id / run.info.run_id / "artifacts"
        assert [(stored / name).read_bytes() for name in names] == [(folder / name).read_bytes() for name in names]


class Server:
    """A tracking server that can be stopped and started again."""

    def __init__(self, project: Project) -> None:
        self.project, self.port = project, free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        store = ["--backend-store-uri", f"sqlite:///{self.project.folder}/server.db"]
        self._process = self.project.popen(*words, *store, start_new_session=True, **quiet)
        wait_for(self._answers, "the tracking server")

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give a running tracking server, and the project that reports to it."""
    server = Server(Project.copy(tmp_path_factory.mktemp("project")))
    shutil.copy(server.project.folder / "mlflow.db", server.project.folder / "server.db")
    server.project.environment |= {
        "MLFLOW_TRACKING_URI": server.address,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "OMP_NUM_THREADS": "1",
    }
    server.start()
    yield server
    server.stop()


def losses(server: Server) -> list[int]:
    """Return the steps whose loss the newest child run has in the tracking server, in order."""
    project = server.project
    client = MlflowClient(server.address)
    children = project.children_of(project.parent_of("main", server.address), server.address)
    return [step for run in children.values() for step, _ in history(client, run).get("loss", [])]


def measured_steps(project: Project) -> list[int]:
    """Return the steps that the newest run has on local disk."""
    *_, result = sorted(project.folder.glob("runs/*-main-*/*/result.json"))
    return [step["step"] for step in json.loads(result.read_text())["result"]["steps"]]


def test_a_server_that_restarts_during_a_run_misses_nothing(server: Server) -> None:
    project = server.project
    with started(project, "python", "-m", "pipeline", "main", *as_words(LONG)) as training:
        wait_for(lambda: any("loss" in run.data.metrics for run in project.runs(server.address)), "the first steps")
        server.stop()
        lines: list[str] = []
        assert training.stderr is not None
        while not any("MLflow did not take" in line for line in lines):
            lines.append(training.stderr.readline())
        server.start()
        before = len(losses(server))
        wait_for(lambda: len(losses(server)) > before, "steps after the restart")
        os.killpg(training.pid, signal.SIGINT)
        _, err = training.communicate(timeout=120)
    assert "all has reached MLflow since" in err
    parent = project.parent_of("main", server.address)
    [child] = project.children_of(parent, server.address).values()
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("KILLED", "KILLED", "interrupted")
    assert losses(server) == measured_steps(project)
    assert not list(project.folder.glob(f"runs/**/{NAME}"))


def test_a_server_that_is_away_and_comes_back_gets_everything_once(server: Server) -> None:
    project = server.project
    num_before = len(project.runs(server.address))
    words = ["python", "-m", "pipeline", "main", *as_words({**SMALL, "num_steps": "1000"})]
    with started(project, *words) as training:
        wait_for(lambda: len(project.runs(server.address)) == num_before + 2, "the child run")
        server.stop()
        out, err = training.communicate(timeout=300)
    assert training.returncode == 0 and "peak MiB" in out, err
    assert err.count("MLflow did not take") == 1 and "going on, results are on disk" in err
    assert "send them with: python -m pipeline sync" in err
    assert len(measured_steps(project)) == 1000
    away = project.call("python", "-m", "pipeline", "sync")
    assert away.returncode == 1 and "repeat this when it is back" in away.stdout
    kept = {file: file.read_bytes() for file in project.folder.glob(f"runs/**/{NAME}")}
    assert len(kept) == 2

    server.start()
    two = [project.popen("python", "-m", "pipeline", "sync") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    assert not list(project.folder.glob(f"runs/**/{NAME}"))
    parent = project.parent_of("main", server.address)
    [child] = project.children_of(parent, server.address).values()
    assert (parent.info.status, child.info.status, child.data.tags["outcome"]) == ("FINISHED", "FINISHED", "ok")
    assert losses(server) == list(range(1000))

    for file, content in kept.items():
        file.write_bytes(content)
    assert project.call("python", "-m", "pipeline", "sync").returncode == 0
    assert losses(server) == list(range(1000)) and len(project.runs(server.address)) == num_before + 2
