"""A password reaches the server that asks for it, and nothing that others read: a file, output, a process list."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient
from processes import free_port, started
from project import SMALL, Project, as_words
from servers import MlflowServer, Postgresql

from fitproof import search
from pipeline.base.errors import InvalidInputError, has_password, without_passwords
from pipeline.cli import main
from pipeline.tracking import ui

WITH_PASSWORD = "postgresql+psycopg://me:very-secret@host/optuna"
WITHOUT_PASSWORD = "postgresql+psycopg://me@host/optuna"
SEARCH = {**SMALL, "effective_batch_size": "2", "budget": "1GiB", "num_trials": "2", "verify_steps": "0"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WITH_PASSWORD, WITHOUT_PASSWORD),
        ("http://me:p@ss/word@host:5000/api: refused", "http://me@host:5000/api: refused"),
        ("mysql://:secret@host", "mysql://@host"),
        ("postgresql://me@host/a?password=secret&port=1", "postgresql://me@host/a?password=***&port=1"),
        ("postgresql://me@[::1]:5432/optuna", "postgresql://me@[::1]:5432/optuna"),
        ("sqlite:////folder:name/optuna.db", "sqlite:////folder:name/optuna.db"),
        ("http://127.0.0.1:5000 is not reachable", "http://127.0.0.1:5000 is not reachable"),
    ],
)  # fmt: skip
def test_passwords_are_removed_from_text(text: str, expected: str) -> None:
    assert without_passwords(text) == expected and without_passwords(expected) == expected
    assert has_password(text) is (text != expected)
    assert str(InvalidInputError(text)) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["search", "--storage", WITH_PASSWORD],
        ["search", "--storage", f"{WITHOUT_PASSWORD}?password=very-secret"],
        ["main", "--model", WITH_PASSWORD],
        ["main", WITH_PASSWORD],
        ["report", "--folder", WITH_PASSWORD],
        ["--storage", WITH_PASSWORD],
    ],
)
def test_a_password_on_a_command_line_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *(["--device", "cpu"] if words[0] in ("search", "main") else [])]) == 2
    captured = capsys.readouterr()
    assert "very-secret" not in captured.out + captured.err
    if words[-2] == "--storage" and words[0] == "search":
        assert "storage must not have a password" in captured.err and "PGPASSWORD" in captured.err


def test_a_password_in_yaml_and_in_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="storage must not have a password") as refused:
        search(storage=WITH_PASSWORD, device="cpu")
    assert "very-secret" not in str(refused.value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "search.yaml").write_text(
        f"space: {{micro_batch_size: divisors}}\nstorage: {WITH_PASSWORD}\n"
    )
    with pytest.raises(InvalidInputError, match="storage must not have a password"):
        search(device="cpu")


@dataclass
class Seen:
    """What has appeared of these secrets while it watched the processes of this machine and the files of a folder."""

    secrets: tuple[str, ...]
    folder: Path
    found: set[str] = field(default_factory=set)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again, since processes end and files are deleted."""
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(0.3):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_done.set()
            thread.join()

    def look(self) -> None:
        """Look once."""
        for process in psutil.process_iter(["cmdline"]):
            self.text(f"the process {process.pid}", " ".join(process.info["cmdline"] or ()))
        for file in self.folder.rglob("unsent.json"):
            self.file(file)

    def file(self, file: Path) -> None:
        """Look at a file, which may have been deleted."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return
        self.text(str(file), content.decode(errors="replace"))

    def text(self, where: str, text: str) -> None:
        """Look at a text."""
        self.found |= {f"{where}: {secret}" for secret in self.secrets if secret in text}


@pytest.fixture(scope="module")
def server(postgresql: Postgresql, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Give a tracking server that asks for a password, and keeps its runs in PostgreSQL."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "auth.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/auth.db\nadmin_username = admin\n"
    )
    environment = {
        **postgresql.environment,
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": f"mlflow-{postgresql.password}",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "key",
    }
    words = ("--app-name", "basic-auth")
    server = MlflowServer(folder, postgresql.url(postgresql.new_database()), words, environment)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.copy(tmp_path_factory.mktemp("project"), with_store=False)


def with_credentials(server: MlflowServer, password: str) -> str:
    return server.address.replace("http://", f"http://admin:{password}@")


@pytest.mark.slow
def test_no_password_of_a_search_is_written_anywhere(
    project: Project, postgresql: Postgresql, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = server.environment["MLFLOW_AUTH_ADMIN_PASSWORD"]
    study = postgresql.url(postgresql.new_database())
    project.environment = {**postgresql.environment, "MLFLOW_TRACKING_URI": with_credentials(server, password)}
    seen = Seen((password, postgresql.password), project.folder)
    with seen.watching():
        done = project.call("python", "-m", "fitproof", "search", *as_words({**SEARCH, "storage": study}))
    assert done.returncode == 0 and "The fastest that fits" in done.stdout, done.stderr
    seen.text("the output", done.stdout + done.stderr)
    for database in (server.store, study):
        seen.text(database, postgresql.dump(database.rpartition("/")[2]))
    for file in (*project.folder.rglob("*"), server.folder / "server.txt"):
        if file.is_file():
            seen.file(file)
    assert not seen.found

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
    parent = project.parent_of("search", server.address)
    children = project.children_of(parent, server.address)
    assert parent.info.status == "FINISHED" and len(children) == 2
    assert MlflowClient(server.address).list_artifacts(parent.info.run_id)


class Refusing(BaseHTTPRequestHandler):
    """What a tracking server answers to who has no valid password."""

    def do_GET(self) -> None:
        self.send_error(401)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def refusing() -> Iterator[str]:
    """Give the host and port of a tracking server that refuses everybody."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_tracking_server_refuses_who_has_no_password(
    refusing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")  # deleted at the end, whatever sets it
    environment = {"MLFLOW_TRACKING_URI": f"http://{refusing}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    project = Project(tmp_path, environment)
    done = project.here("main", SMALL)
    assert done.returncode == 2 and "error code 401" in done.stderr
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in done.stderr
    environment["MLFLOW_TRACKING_URI"] = f"http://admin:a-wrong-secret@{refusing}"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    compared = project.here("compare", {"experiment": "fitproof"})
    shown = ui.main(free_port()), *capsys.readouterr()
    for code, out, err in ((compared.returncode, compared.stdout, compared.stderr), shown):
        assert code == 2 and f"{refusing} is not" in err, err
        assert "a-wrong-secret" not in out + err and "Traceback" not in err


@pytest.mark.slow
def test_no_password_of_a_store_that_is_a_database_is_written_anywhere(
    project: Project, postgresql: Postgresql
) -> None:
    store = postgresql.url(postgresql.new_database(), with_password=True)
    project.environment = {"MLFLOW_TRACKING_URI": store}
    seen = Seen((postgresql.password,), project.folder)
    with seen.watching():
        done = project.call("python", "-m", "fitproof", "main", *as_words(SMALL))
        assert done.returncode == 0, done.stderr
        seen.text("the output", done.stdout + done.stderr)
        port = free_port()
        with started(project, "python", "-m", "pipeline.tracking.ui", str(port), stderr=subprocess.DEVNULL) as ui:
            assert ui.stdout is not None
            shown = next(line for line in ui.stdout if line.startswith("the runs: "))
            seen.text("the UI", shown)
            family = [psutil.Process(ui.pid), *psutil.Process(ui.pid).children(recursive=True)]
            listening = [one for process in family for one in process.net_connections("tcp") if one.status == "LISTEN"]
            assert {one.laddr.ip for one in listening} == {"127.0.0.1"} and port in {
                one.laddr.port for one in listening
            }
    seen.text(store, postgresql.dump(store.rpartition("/")[2]))
    for file in project.folder.rglob("*"):
        if file.is_file():
            seen.file(file)
    assert not seen.found
    wrong = store.replace(postgresql.password, "a-wrong-secret")
    project.environment = {"MLFLOW_TRACKING_URI": wrong}
    done = project.here("main", SMALL)
    assert done.returncode == 2 and "password authentication failed" in done.stderr and "PGPASSWORD" in done.stderr
    assert "a-wrong-secret" not in done.stdout + done.stderr and "Traceback" not in done.stderr
