"""A study in PostgreSQL: messages where the server refuses, and a server that is stopped and started again."""

import inspect
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.distributions import FloatDistribution
from optuna.storages import RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.study import StudyDirection
from optuna.trial import TrialState
from processes import free_port
from servers import Postgresql, Proxy

from pipeline.base.errors import InvalidInputError
from pipeline.config.space import Space
from pipeline.searching import storage
from pipeline.searching.storage import open_storage, reachable
from pipeline.searching.study import StoredStudy
from pipeline.searching.trials import Proposal

SPACE = Space({"micro_batch_size": (1, 2, 4)})


def refusal(address: str) -> str:
    """Return the message with which this storage is refused."""
    with pytest.raises(InvalidInputError) as refused, reachable(address, Exception):
        open_storage(address)
    return str(refused.value)


def test_a_study_is_created_once_and_shared(database_url: str) -> None:
    def open_study(_: int) -> str:
        return StoredStudy(database_url, "shared", ("maximize",), {"budget": "1GiB"}).name

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_study, range(4))) == ["shared"] * 4
    one, other = (StoredStudy(database_url, "shared", ("maximize",), {"budget": "1GiB"}) for _ in range(2))
    assert one.enqueue(Proposal(SPACE.choices[0]), SPACE) and not other.enqueue(Proposal(SPACE.choices[0]), SPACE)
    assert other.taken == [SPACE.choices[0]]


def test_a_url_without_a_driver_takes_psycopg(database_url: str) -> None:
    study = optuna.create_study(storage=open_storage(database_url.replace("+psycopg", "")), study_name="plain")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    again = optuna.load_study(storage=open_storage(database_url), study_name="plain")
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 2


def test_heartbeats_are_those_of_the_storage(database_url: str, tmp_path: Path) -> None:
    for address in (database_url, f"sqlite:///{tmp_path}/optuna.db"):
        opened = open_storage(address, heartbeat_interval=1, grace_period=5)
        backend = opened._backend  # type: ignore[attr-defined]
        assert isinstance(backend, RDBStorage)
        assert (backend.get_heartbeat_interval(), backend.grace_period) == (1, 5)


def test_a_wrong_password_is_refused_with_where_to_write_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "wrong-secret")
    message = refusal(database_url)
    assert 'password authentication failed for user "fitproof"' in message and "~/.pgpass" in message
    assert "wrong-secret" not in message
    monkeypatch.delenv("PGPASSWORD")
    assert "no password supplied" in refusal(database_url) and "set PGPASSWORD" in refusal(database_url)
    assert "other-secret" not in refusal(database_url.replace("fitproof@", "fitproof:other-secret@"))


def test_a_password_file_is_read(
    database_url: str, postgresql: Postgresql, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"127.0.0.1:{postgresql.port}:*:fitproof:{postgresql.password}\n")
    file.chmod(0o600)
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setenv("PGPASSFILE", str(file))
    assert open_storage(database_url).get_all_studies() == []


def test_a_missing_database_a_stranger_and_a_wrong_address_are_refused(
    database_url: str, postgresql: Postgresql
) -> None:
    missing = refusal(postgresql.url("nowhere"))
    assert 'database "nowhere" does not exist' in missing and "createdb" in missing
    with postgresql.connect() as connection:
        connection.execute(f"CREATE ROLE stranger LOGIN PASSWORD '{postgresql.password}'".encode())
    assert "permission denied" in refusal(database_url.replace("fitproof@", "stranger@"))
    closed = refusal(f"postgresql+psycopg://fitproof@127.0.0.1:{free_port()}/optuna")
    assert "Connection refused" in closed and "the same command resumes the search once it is" in closed
    assert "bogus" in refusal(f"{database_url}?bogus=1")


def test_a_server_that_is_too_old_is_refused(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "OLDEST_POSTGRESQL", 99)
    assert "storage must be PostgreSQL 99 or newer, and the server at 127.0.0.1 is " in refusal(database_url)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    message = refusal("postgresql+psycopg://fitproof@127.0.0.1/optuna")
    assert "needs the package psycopg, which is not installed; pip install '.[postgresql]' in the checkout" in message
    assert "pip install 'psycopg2'" in refusal("postgresql+psycopg2://fitproof@127.0.0.1/optuna")


def test_a_server_that_does_not_answer_is_refused_within_seconds(
    database_url: str, postgresql: Postgresql, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "POSTGRESQL_ARGUMENTS", {"connect_timeout": 2})
    proxy.hang()
    before = time.monotonic()
    assert "timeout" in refusal(database_url.replace(str(postgresql.port), str(proxy.port)))
    assert time.monotonic() - before < 30


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_server_that_is_away_for_a_while_loses_no_trial(
    database_url: str, postgresql: Postgresql, how: signal.Signals
) -> None:
    study = optuna.create_study(
        storage=open_storage(database_url, heartbeat_interval=1, grace_period=60), study_name="away"
    )
    is_back = threading.Event()
    after = []

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("number", trial.number)
        if is_back.is_set():
            after.append(trial.number)
        if len(after) == 3:
            study.stop()
        return trial.suggest_float("x", 0, 1)

    def interrupt() -> None:
        time.sleep(0.5)
        postgresql.stop(how)
        time.sleep(1)
        postgresql.start()
        is_back.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    study.optimize(objective, timeout=120)
    thread.join()
    trials = study.trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE} and len(after) == 3
    assert [trial.user_attrs["number"] for trial in trials] == list(range(len(trials)))


CALLS: dict[str, Callable[[Any, int, int], Any]] = {
    "a list of trials": lambda storage, study, trial: storage._backend._get_trials(study, None, {trial}, trial),
    "a trial": lambda storage, study, trial: storage._backend.get_trial(trial),
    "a new trial": lambda storage, study, trial: storage.create_new_trial(study),
    "a parameter": lambda storage, study, trial: storage.set_trial_param(trial, "x", 1.0, FloatDistribution(0, 1)),
    "an attribute": lambda storage, study, trial: storage.set_trial_user_attr(trial, "name", 1),
    "a heartbeat": lambda storage, study, trial: storage.record_heartbeat(trial),
    "a result": lambda storage, study, trial: storage.set_trial_state_values(trial, TrialState.COMPLETE, [1.0]),
}


@pytest.mark.parametrize("at", ["first statement", "commit"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_whose_connection_breaks_is_repeated(
    database_url: str, postgresql: Postgresql, call: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SECONDS_BETWEEN_ATTEMPTS", 0.05)
    opened = open_storage(database_url)
    study = optuna.create_study(storage=opened, study_name="broken", direction="maximize")
    trial = study.ask()._trial_id
    backend: Any = opened._backend  # type: ignore[attr-defined]
    broken = []

    def break_connection(connection: Any, *_: Any) -> None:
        if not broken:
            broken.append(connection.connection.dbapi_connection.info.backend_pid)
            with postgresql.connect() as other:
                other.execute("SELECT pg_terminate_backend(%s)", broken)

    event = {"first statement": "before_cursor_execute", "commit": "commit"}[at]
    sqlalchemy.event.listen(backend.engine, event, break_connection)
    CALLS[call](opened, study._study_id, trial)
    assert broken
    [stored, *others] = optuna.load_study(storage=open_storage(database_url), study_name="broken").trials
    assert len(others) == (call == "a new trial")
    assert stored.params == ({"x": 1.0} if call == "a parameter" else {})
    assert stored.user_attrs == ({"name": 1} if call == "an attribute" else {})
    assert stored.values == ([1.0] if call == "a result" else None)


def test_optunas_cache_calls_no_method_that_is_not_repeated() -> None:
    called = set(re.findall(r"self\._backend\.(\w+)\(", inspect.getsource(_CachedStorage)))
    of_our_own = {name for name in called if f"def {name}" in inspect.getsource(storage.PatientStorage)}
    asks_no_server = {"get_heartbeat_interval", "get_heartbeat_stale_trial_callback", "get_failed_trial_callback"}
    not_of_a_search = {"create_new_study", "delete_study", "_get_best_trial_id"}
    assert called - asks_no_server - not_of_a_search - of_our_own <= set(storage.REPEATABLE)


class Clock:
    """A clock in place of the module `time`, which only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("waits", ["the question which workers are dead", "another call"])
def test_no_worker_counts_as_dead_soon_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """The last heartbeat of the trial's worker is an hour old."""
    grace_period = 30
    opened: Any = open_storage(f"sqlite:///{tmp_path}/optuna.db", heartbeat_interval=1, grace_period=grace_period)
    study = opened.create_new_study([StudyDirection.MAXIMIZE])
    trial = opened.create_new_trial(study)
    opened.record_heartbeat(trial)
    with opened._backend.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
    assert opened._get_stale_trial_ids(study) == [trial]

    clock, back_at = Clock(), 2 * storage.SECONDS_OF_AN_OUTAGE
    monkeypatch.setattr(storage, "time", clock)

    def break_connection(*_: Any) -> None:
        if clock.now < back_at:
            raise sqlalchemy.exc.OperationalError("", {}, Exception("no server"), connection_invalidated=True)

    sqlalchemy.event.listen(opened._backend.engine, "before_cursor_execute", break_connection)
    if waits == "another call":
        opened.set_trial_user_attr(trial, "name", 1)
    assert opened._get_stale_trial_ids(study) == [] and clock.now >= back_at
    clock.now = back_at + grace_period - 1
    assert opened._get_stale_trial_ids(study) == []
    clock.now = back_at + grace_period + 1
    assert opened._get_stale_trial_ids(study) == [trial]


def test_a_heartbeat_that_fails_is_followed_by_the_next_one(tmp_path: Path) -> None:
    """Optuna's thread ends with an error of one."""
    opened: Any = open_storage(f"sqlite:///{tmp_path}/optuna.db", heartbeat_interval=1, grace_period=30)
    trial = opened.create_new_trial(opened.create_new_study([StudyDirection.MAXIMIZE]))
    failed = []

    def fail_once(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "trial_heartbeats" in statement and not failed:
            failed.append(statement)
            raise sqlalchemy.exc.OperationalError("", {}, Exception("database is locked"))

    sqlalchemy.event.listen(opened._backend.engine, "before_cursor_execute", fail_once)
    with get_heartbeat_thread(trial, opened):
        time.sleep(1.5)
    with opened._backend.engine.begin() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM trial_heartbeats").all()
    assert failed and len(rows) == 1


def test_no_thread_of_a_process_waits_for_the_connection_of_another(database_url: str) -> None:
    """SQLAlchemy gives up after 30 seconds, while a server that is away is waited for longer."""
    opened: Any = open_storage(database_url)
    with ExitStack() as stack:
        connections = [stack.enter_context(opened._backend.engine.connect()) for _ in range(16)]
    assert len(connections) == 16


def test_a_network_that_is_cut_or_hangs_for_a_while_loses_no_trial(
    database_url: str, postgresql: Postgresql, proxy: Proxy
) -> None:
    address = database_url.replace(str(postgresql.port), str(proxy.port))
    study = optuna.create_study(storage=open_storage(address), study_name="cut")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    proxy.cut()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    proxy.hang()
    threading.Timer(1.0, proxy.flow).start()
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 6
