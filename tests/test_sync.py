"""Nothing measured gets lost: what MLflow does not take is kept on disk, and sent later, once."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.cli import main
from pipeline.tracking.journal import NAME, Start
from pipeline.tracking.outbox import KEY, Outbox, is_refusal, now
from pipeline.tracking.store import lasting

JOB = "20260101-120000-main-abcdefgh"


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
            leave(tmp_path, name, f"http://127.0.0.1:{server.server_port}", "1").close()
        assert main(["sync", "--output", str(tmp_path)]) == 1
        server.shutdown()
    assert len(asked) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("0 of 405 records sent" in line and problem in line for line in said)
    assert all("repeat this when it is back" in line for line in said)


def test_no_password_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert lasting("postgresql://me:secret@host/runs") == "postgresql://me@host/runs"
    assert lasting("https://host:5000") == "https://host:5000"
    monkeypatch.chdir(tmp_path)
    assert lasting("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert lasting(f"sqlite:///{tmp_path}/mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
