"""Servers that tests need: PostgreSQL, MLflow, and a network between them that can fail; all on this machine alone."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import free_port, wait_for
from project import NO_JOBS

if TYPE_CHECKING:
    import psycopg

LAUNCHER = ThreadPoolExecutor(max_workers=1)
"""The thread that starts servers, which end when it ends: that of a test may end before."""
ADMINISTRATOR = "fitproof"
"""The user that owns the databases."""


def _programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, the newest where there are several."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda file: int(file.parts[-3]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


def launched(words: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Return a process in a session of its own, whose end is tied to that of the tests."""
    return LAUNCHER.submit(subprocess.Popen, words, start_new_session=True, **options).result()


@dataclass
class Postgresql:
    """A PostgreSQL server with password authentication, in a temporary folder."""

    folder: Path
    programs: Path
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: f"secret{secrets.token_hex(8)}")
    _process: "subprocess.Popen[bytes] | None" = None

    def create(self) -> None:
        """Make the files of the server."""
        file = self.folder / "password"
        file.write_text(self.password)
        if os.geteuid() == 0:
            for path in (self.folder, file):
                shutil.chown(path, *self._owner)
        words = ["--pgdata", self._data, "--username", ADMINISTRATOR, "--pwfile", str(file), "--no-sync"]
        subprocess.run(
            [*self._as_owner, str(self.programs / "initdb"), *words, "--auth=scram-sha-256", "--encoding=UTF8"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
        )
        file.unlink()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "max_connections": 200,
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / "log.txt").open("ab") as log:
            self._process = launched(
                [*self._as_owner, str(self.programs / "postgres"), "-D", self._data, *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, "PostgreSQL")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server, which ends all connections first; SIGQUIT ends it as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None

    def url(self, database: str, *, with_password: bool = False, port: int | None = None) -> str:
        """Return the URL of a database; `port` is that of another way to the server."""
        user = f"{ADMINISTRATOR}:{self.password}" if with_password else ADMINISTRATOR
        return f"postgresql+psycopg://{user}@127.0.0.1:{port or self.port}/{database}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to connect to a URL without a password."""
        return {"PGPASSWORD": self.password}

    def new_database(self) -> str:
        """Create a database and return its name."""
        name = f"test_{secrets.token_hex(4)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return name

    def dump(self, database: str) -> str:
        """Return everything that a database holds, as text."""
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--username", ADMINISTRATOR, database]
        dumped = subprocess.run(
            [str(self.programs / "pg_dump"), *words],
            env={**os.environ, **self.environment},
            check=True,
            capture_output=True,
            text=True,
        )
        return dumped.stdout

    def connect(self, database: str = "postgres") -> "psycopg.Connection[tuple[object, ...]]":
        """Return a connection that commits each statement."""
        import psycopg

        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=ADMINISTRATOR,
            password=self.password,
            dbname=database,
            autocommit=True,
            connect_timeout=10,
        )

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "log.txt").read_text()
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            self.connect().close()
            return True
        return False

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    @property
    def _owner(self) -> tuple[str, str]:
        """The user and group of the server: PostgreSQL refuses root."""
        names = {user.pw_name for user in pwd.getpwall()}
        return ("postgres", "postgres") if "postgres" in names else ("nobody", "nogroup")

    @property
    def _as_owner(self) -> list[str]:
        """The words in front of a command that make it end with this process, and not be root."""
        user, group = self._owner
        other = ["--reuid", user, "--regid", group, "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", "--pdeathsig", "QUIT", *other]


@contextlib.contextmanager
def running_postgresql() -> Iterator[Postgresql]:
    """Give a running server; without PostgreSQL on this machine the test is skipped, and fails in a CI."""
    programs = _programs()
    if programs is None:
        missing = "needs PostgreSQL: apt-get install postgresql"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="postgresql-", ignore_cleanup_errors=True) as folder:
        server = Postgresql(Path(folder), programs)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)


@dataclass
class MlflowServer:
    """A tracking server of MLflow that can be stopped and started again."""

    folder: Path
    store: str
    """The URI of its backend store."""
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    _process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        """Its tracking URI."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        own = {**NO_JOBS, "MLFLOW_BACKEND_STORE_URI": self.store, "OMP_NUM_THREADS": "1"}
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1", *self.words]
        with (self.folder / "server.txt").open("ab") as log:
            self._process = launched(
                ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "mlflow", "server", *words],
                cwd=self.folder,
                env={**inherited, **own, **self.environment},
                stdout=log,
                stderr=log,
            )
        wait_for(self._answers, "the tracking server")

    def stop(self) -> None:
        """End the server and its workers at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "server.txt").read_text()
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Proxy:
    """A way to a port of this machine that can hang, and be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def hang(self) -> None:
        """Accept what arrives, and pass nothing on."""
        self._flows.clear()

    def flow(self) -> None:
        """Pass on what has arrived, and all that follows."""
        self._flows.set()

    def cut(self) -> None:
        """Break all connections."""
        while self._sockets:
            with contextlib.suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no connection any more, and break the others."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._flows.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._flows.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._sockets += [client, server]
        for pair in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()  # the other thread closes the target


@contextlib.contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Give a proxy in front of this port."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
