"""Opens Optuna's storage from its URL: SQLite, which waits for a lock, or PostgreSQL, which waits for its server."""

import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError, SQLAlchemyError

from pipeline.base.errors import InvalidInputError, first_line

Result = TypeVar("Result")

IN_MEMORY = ("sqlite://", "sqlite:///:memory:")
"""Databases that nothing of a search outlives."""
SECONDS_FOR_A_LOCK = 20.0
"""How long to wait for a storage's file while another process locks or creates it."""
SECONDS_TO_CONNECT = 5
"""How long a server may take to accept a connection."""
SECONDS_FOR_A_SERVER = 120.0
"""How long to wait for a server that has been reached before: a restart, or a failover to another machine."""
SECONDS_OF_AN_OUTAGE = 2.0
"""A call that takes longer has waited for the server, its network or a lock, as those of other workers may have."""
SECONDS_BETWEEN_ATTEMPTS = 0.5
OLDEST_POSTGRESQL = 10
"""The oldest major version of PostgreSQL that psycopg supports."""
POSTGRESQL_ARGUMENTS: Mapping[str, Any] = {
    "connect_timeout": SECONDS_TO_CONNECT,
    "fallback_application_name": "fitproof",
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Arguments of libpq: a network that lost the connection is noticed within a minute; the URL's own arguments win."""
REMEDIES = {
    "no password supplied": "set PGPASSWORD, or write a line for it to ~/.pgpass",
    "password authentication failed": "check the user in the URL, and PGPASSWORD or the line in ~/.pgpass",
    "permission denied": "let its user own the database: createdb --owner USER DATABASE",
    "does not exist": "create the database with createdb, or the user with createuser",
}
"""What to do, by a part of PostgreSQL's message."""
SHUTDOWN = ("57P01", "57P02", "57P03")
"""What PostgreSQL answers while it stops, after a crash, and while it starts."""
REPEATABLE = (
    *("set_study_user_attr", "set_study_system_attr", "get_study_id_from_name", "get_study_name_from_id"),
    *("get_study_directions", "get_study_user_attrs", "get_study_system_attrs", "get_all_studies"),
    *("_set_trial_param", "set_trial_intermediate_value", "set_trial_user_attr", "set_trial_system_attr"),
    *("get_trial", "get_all_trials", "_get_trials", "get_trial_id_from_study_id_trial_number"),
    "_create_new_trial",
)
"""Methods that may be called twice: the effect is the same, or a trial that a worker finds superfluous.

Where one public method calls another that begins with an underscore, it is that one: Optuna's cache calls it directly.
"""


def open_storage(url: str, **options: Any) -> BaseStorage:
    """Return the storage at `url`, with the options of an RDBStorage; its tables are created if they are missing.

    Another process may create them at the same moment.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=ExperimentalWarning)  # heartbeats, and names of objectives
    warnings.filterwarnings("ignore", "Heartbeat of storage is supposed to be used")  # StoredStudy stores them
    if url in IN_MEMORY:  # each thread would get a database of its own
        return InMemoryStorage()

    def is_being_created(error: Exception) -> bool:
        return "already exists" in str(error) or isinstance(error, IntegrityError)

    return _patiently(lambda: optuna.storages.get_storage(_connect(url, options)), is_being_created, SECONDS_FOR_A_LOCK)


def _patiently(call: Callable[[], Result], may_pass: Callable[[Exception], bool], seconds: float) -> Result:
    """Return what a call returns; it is repeated for so many seconds while it ends with an error that may pass."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception as error:
            if not may_pass(error) or time.monotonic() > deadline:
                raise
        time.sleep(SECONDS_BETWEEN_ATTEMPTS)


@contextmanager
def reachable(url: str, kind: type[Exception]) -> Iterator[None]:
    """Raise InvalidInputError in place of an error of this kind, with what to do about it."""
    try:
        yield
    except InvalidInputError:
        raise
    except kind as error:
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):  # the driver, or what it needs
            module = cause.name or "psycopg"
            package = "'.[postgresql]' in the checkout" if module == "psycopg" else f"'{module}'"
            raise InvalidInputError(
                f"storage={url} needs the package {module}, which is not installed; pip install {package}"
            ) from error
        first = first_line(getattr(cause, "orig", None) or cause)
        default = "the same command resumes the search once it is, or set storage=sqlite:///optuna.db"
        remedy = next((remedy for part, remedy in REMEDIES.items() if part in first), default)
        raise InvalidInputError(
            f"the study's storage must be reachable, and {url} is not ({first}); {remedy}"
        ) from error


def refuse_missing_file(url: str) -> None:
    """Refuse an SQLite file that does not exist: opening it would create it."""
    parts = sqlalchemy.make_url(url)
    if parts.get_backend_name() == "sqlite" and parts.database and not Path(parts.database).exists():
        raise InvalidInputError(
            f"storage must be that of a search that has begun, and {url} is a file that does not exist; check its path"
        )


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of PatientStorage that repeats this method of RDBStorage while its connection breaks."""

    @wraps(method)
    def call(self: "PatientStorage", *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        found = _patiently(lambda: method(self, *args, **kwargs), _is_disconnected, SECONDS_FOR_A_SERVER)
        if time.monotonic() - start > SECONDS_OF_AN_OUTAGE:
            self.outage_ended = time.monotonic()
        return found

    return call


class PatientStorage(RDBStorage):  # type: ignore[misc]
    """RDBStorage that repeats a call whose connection broke, and closes its connections at the end."""

    outage_ended = -math.inf
    """When a call last succeeded after an outage, in seconds of time.monotonic()."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except Exception:
            if hasattr(self, "engine"):
                self.engine.dispose()
            raise
        weakref.finalize(self, _close, self.engine, os.getpid())

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Return the running trials without a heartbeat; none soon after an outage, in which no worker stored any.

        The call itself may be the one that has waited for the server.
        """
        found: list[int] = _repeated(RDBStorage._get_stale_trial_ids)(self, study_id)
        return found if time.monotonic() - self.outage_ended > (self.grace_period or 0) else []

    def record_heartbeat(self, trial_id: int) -> None:
        """Record a heartbeat, or none if it fails: the next one follows, which an error would prevent."""
        with suppress(StorageInternalError, SQLAlchemyError):
            _repeated(RDBStorage.record_heartbeat)(self, trial_id)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Set the state of a trial; where the connection broke after it was stored, the end of a trial counts as set.

        Who set a trial to running would be unknown: it counts as taken by another worker.
        """
        try:
            return bool(super().set_trial_state_values(trial_id, state, values))
        except Exception as error:
            if not _is_disconnected(error):
                raise
            if not state.is_finished():
                return False
            return self.get_trial(trial_id).state is state or self.set_trial_state_values(trial_id, state, values)


for _name in REPEATABLE:
    setattr(PatientStorage, _name, _repeated(getattr(RDBStorage, _name)))


def _connect(url: str, options: Mapping[str, Any]) -> PatientStorage:
    """Return the storage, connected once: from then on it waits for a server that does not answer."""
    parts = sqlalchemy.make_url(url)
    dialect = parts.get_backend_name()
    of_engine: dict[str, Any] = {}
    if dialect == "sqlite":
        of_engine = {"connect_args": {"timeout": SECONDS_FOR_A_LOCK}}  # longer than the 5 seconds of Python's sqlite3
    elif dialect == "postgresql":
        if parts.drivername == "postgresql":
            parts = parts.set(drivername="postgresql+psycopg")
        arguments = {name: value for name, value in POSTGRESQL_ARGUMENTS.items() if name not in parts.query}
        # One connection stays open in each process: a server of default settings has 100 for all workers. None waits
        # for another that waits for the server.
        of_engine = {"connect_args": arguments, "pool_pre_ping": True, "pool_size": 1, "max_overflow": -1}
    storage = PatientStorage(parts.render_as_string(hide_password=False), of_engine, **options)
    if dialect == "sqlite":
        sqlalchemy.event.listen(storage.engine, "connect", _begin_nothing)
        sqlalchemy.event.listen(storage.engine, "begin", _lock_at_once)
        storage.engine.dispose()  # connections from before
    if dialect == "postgresql":
        _refuse_old(parts, storage.engine.dialect.server_version_info)
    if dialect != "sqlite":
        sqlalchemy.event.listen(storage.engine, "do_connect", _connect_patiently)
    return storage


def _begin_nothing(connection: Any, _record: Any) -> None:
    """Let SQLAlchemy begin transactions: Python's sqlite3 would begin one only at its first write."""
    connection.isolation_level = None


def _lock_at_once(connection: sqlalchemy.Connection) -> None:
    """Lock the file when a transaction begins, so that two workers cannot both read that a trial waits and take it."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _close(engine: sqlalchemy.Engine, process: int) -> None:
    """Close the connections of this process; a fork of it leaves them open."""
    if os.getpid() == process:
        engine.dispose()


def _connect_patiently(dialect: Any, _record: Any, args: Any, kwargs: Any) -> Any:
    """Return a connection as soon as the server accepts one."""

    def is_refused(error: Exception) -> bool:
        return isinstance(error, dialect.loaded_dbapi.OperationalError)

    return _patiently(lambda: dialect.connect(*args, **kwargs), is_refused, SECONDS_FOR_A_SERVER)


def _is_disconnected(error: Exception) -> bool:
    """Whether a connection broke while it was in use, or the server announced that it would break."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    if isinstance(cause, DBAPIError):
        return cause.connection_invalidated or getattr(cause.orig, "sqlstate", None) in SHUTDOWN
    return isinstance(cause, PendingRollbackError)  # of a statement that Optuna tries after the one that failed


def _refuse_old(url: sqlalchemy.URL, version: tuple[int, ...]) -> None:
    if version[0] < OLDEST_POSTGRESQL:
        raise InvalidInputError(
            f"storage must be PostgreSQL {OLDEST_POSTGRESQL} or newer, and the server at {url.host or 'the socket'} is "
            f"{'.'.join(map(str, version))}; name another server, or set storage=sqlite:///optuna.db"
        )
