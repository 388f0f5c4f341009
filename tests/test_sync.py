"""Nothing that was measured is lost: what MLflow does not accept stays on disk, and `sync` sends it once."""

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.cli import main
from pipeline.runtime.ownership import this_process
from pipeline.runtime.run_folder import milliseconds_now
from pipeline.tracking.store import check_database, is_refusal, portable_uri
from pipeline.tracking.unsent import KEY, NAME, Manifest, UnsentRun

JOB = "20260101-120000-main-abcdefgh"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> MlflowClient:
    """Give the client of a store of its own."""
    return MlflowClient(f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db")


@pytest.fixture
def experiment_id(client: MlflowClient, tmp_path: Path) -> str:
    """Give an experiment of the test's own."""
    return str(client.create_experiment(tmp_path.name, artifact_location=str(tmp_path / "artifacts")))


def leave(output: Path, name: str, uri: str, experiment_id: str, owner: Mapping[str, Any] | None = None) -> UnsentRun:
    """Measure a run and end it without sending anything."""
    folder = output / JOB / name
    folder.mkdir(parents=True)
    start = milliseconds_now()
    manifest = Manifest(
        uri=uri,
        experiment_id=experiment_id,
        name=name,
        tags={"technique": "main"},
        start_time=start,
        key=name,
        owner=owner,
    )
    run = UnsentRun(folder, manifest)
    (folder / "result.json").write_text("{}")
    lines = [
        {"step": step, "time": start + step, "values": {"loss": 1 / (step + 1), "seconds": 0.1}} for step in range(400)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update(
        params={"seed": "0"},
        dataset={"name": "text", "digest": "abc", "source": "{}", "profile": "{}"},
        metrics=({"values": {"mean_loss": 0.5}, "time": start + 400},),
        artifacts=(("result.json", None),),
        tags={"technique": "main", "outcome": "ok"},
        status="FINISHED",
        end_time=start + 500,
    )
    return run


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


def test_what_was_left_is_sent_once_however_often_it_is_sent(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs"
    run = leave(output, "one", client.tracking_uri, experiment_id)
    file = run.folder / NAME
    content = file.read_bytes()
    assert main(["sync", "--output", str(output)]) == 0
    assert f"{run.folder}: sent" in capsys.readouterr().out
    assert not file.exists()
    once = state(client, experiment_id)
    [(_, params, tags, points, files, datasets)] = once
    assert params == {"seed": "0"} and files == ["result.json"] and datasets == [("text", "abc")]
    assert (tags["outcome"], tags[KEY]) == ("ok", "one")
    assert points["step/loss"] == [(step, 1 / (step + 1)) for step in range(400)]
    assert points["loss/mean"] == [(0, 0.5)]

    file.write_bytes(content)
    assert main(["sync", "--output", str(output)]) == 0
    assert state(client, experiment_id) == once


def test_a_damaged_file_is_reported_and_everything_else_is_sent(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn, damaged, whole = (leave(tmp_path, n, client.tracking_uri, experiment_id) for n in ("b", "a", "c"))
    steps = torn.folder / "steps.jsonl"
    steps.write_bytes(steps.read_bytes()[:-10])  # a kill in the middle of a line
    (damaged.folder / NAME).write_bytes(b"\x00" * 100)
    assert main(["sync", "--output", str(tmp_path)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert f"{damaged.folder / NAME} cannot be read" in first and "the results are in the files next to it" in first
    assert others == [f"{torn.folder}: sent", f"{whole.folder}: sent"]
    assert [len(points["step/loss"]) for _, _, _, points, _, _ in state(client, experiment_id)] == [399, 400]
    assert (damaged.folder / NAME).exists()


def test_a_run_whose_creation_was_not_answered_is_not_created_twice(
    client: MlflowClient, experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    create = client.create_run

    def lose_the_answer(*args: Any) -> None:
        create(*args)
        create(*args)  # as MLflow's own retries do
        raise mlflow.MlflowException("API request failed with timeout exception")

    monkeypatch.setattr(client, "create_run", lose_the_answer)
    error = run.send(client)
    assert error is not None and not is_refusal(error) and not run.is_sent
    monkeypatch.undo()
    assert run.send(client) is None and run.is_sent
    [(_, _, _, points, _, _)] = state(client, experiment_id)
    assert len(points["step/loss"]) == 400


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    run.update(metrics=({"values": {"an \\ invalid \n name": 1.0}, "time": 0},))
    assert main(["sync", "--output", str(tmp_path)]) == 1
    assert f"delete {run.folder / NAME} to skip it in future" in capsys.readouterr().out
    [stored] = client.search_runs([experiment_id])
    assert stored.info.status == "FINISHED" and stored.data.metrics["step/loss"] == 1 / 400


def test_params_that_the_run_has_already_stay_as_they_are(
    client: MlflowClient, experiment_id: str, tmp_path: Path
) -> None:
    run = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    created = client.create_run(experiment_id)
    client.log_param(created.info.run_id, "seed", "0.0")  # as `mlflow run` logs what the user wrote
    run.update(run_id=created.info.run_id, params={"seed": "0", "model": "gpt2-nano"})
    assert run.send(client) is None
    assert client.get_run(created.info.run_id).data.params == {"seed": "0.0", "model": "gpt2-nano"}


def test_a_run_whose_process_lives_is_left_alone(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, "one", client.tracking_uri, experiment_id, this_process())
    assert main(["sync", "--output", str(tmp_path)]) == 0
    assert "skipped: another process is sending it" in capsys.readouterr().out
    assert not client.search_runs([experiment_id])


def test_a_run_of_another_machine_is_sent_once_its_end_is_said(
    client: MlflowClient, experiment_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(tmp_path, "one", client.tracking_uri, experiment_id, {**this_process(), "host": "elsewhere"})
    assert main(["sync", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "of a process on elsewhere, which cannot be seen from here" in said and "is left to send" not in said
    assert main(["sync", "--output", str(tmp_path), "--others_ended", "true"]) == 0
    assert len(client.search_runs([experiment_id])) == 1


@pytest.mark.parametrize(("outcome", "status"), [(None, "KILLED"), ("out_of_memory", "FAILED"), ("ok", "FINISHED")])
def test_a_run_whose_process_was_killed_ends_with_its_outcome(
    outcome: str | None, status: str, client: MlflowClient, experiment_id: str, tmp_path: Path
) -> None:
    run = leave(tmp_path, "one", client.tracking_uri, experiment_id)
    run.update(status=None, end_time=None, tags={})
    if outcome is not None:
        (run.folder / "result.json").write_text(json.dumps({"result": {"outcome": outcome}}))
    assert main(["sync", "--output", str(tmp_path)]) == 0
    [stored] = client.search_runs([experiment_id])
    assert (stored.info.status, stored.data.tags["outcome"]) == (status, outcome or "interrupted")


def test_a_database_is_checked_without_leaving_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []
    create = sqlalchemy.create_engine

    def create_engine(*words: Any) -> Any:
        engines.append(create(*words))
        return engines[-1]

    monkeypatch.setattr(sqlalchemy, "create_engine", create_engine)
    check_database(f"sqlite:///{tmp_path}/mlflow.db")
    [engine] = engines
    assert engine.pool.checkedin() == 0 and engine.pool.checkedout() == 0


@pytest.mark.parametrize(("seconds", "problem"), [(0.0, "503"), (2.0, "timeout")])
def test_a_server_that_fails_or_hangs_is_asked_once(
    seconds: float, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Broken(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            time.sleep(seconds)
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("one", "two"):
            leave(tmp_path, name, f"http://127.0.0.1:{server.server_port}", "1")
        assert main(["sync", "--output", str(tmp_path)]) == 1
        server.shutdown()
    assert len(asked) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("did not accept it" in line and problem in line for line in said)
    assert all("run sync again when the store is back" in line for line in said)


def test_no_password_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert portable_uri("postgresql://me:secret@host/runs") == "postgresql://me@host/runs"
    assert portable_uri("https://host:5000") == "https://host:5000"
    monkeypatch.chdir(tmp_path)
    assert portable_uri("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert portable_uri(f"sqlite:///{tmp_path}/mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
