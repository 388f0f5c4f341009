"""MLflow from one background thread: a store that goes away never stops a training."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# An unreachable server is found out within seconds, not minutes; the user's own choice stands.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import sqlalchemy
from mlflow import MlflowClient
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking import get_tracking_uri

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.tracking.outbox import Outbox

logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs a traceback of what it raises, too

PATIENCE_SECONDS = 2.0
"""An attempt that failed after longer than this made us wait."""
SECONDS_BEFORE_RETRY = 30.0
"""How long a store that made us wait in vain is left alone."""
REMEDY = "send them with: python -m pipeline sync"


class Store:
    """MLflow, from one thread and without exceptions: what cannot be sent is said once, and kept until it can."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking")
        self._outboxes: list[Outbox] = []
        self._quiet_until = 0.0
        self._complained = False

    def add(self, outbox: Outbox) -> None:
        """Care for the outbox of another run, and create the run in the background."""
        self._outboxes.append(outbox)
        self.send(outbox)

    def send(self, outbox: Outbox) -> None:
        """Send what waits in this outbox in the background."""
        self._executor.submit(self._attempt, outbox)

    def do(self, call: Callable[[MlflowClient], object]) -> None:
        """Make this call in the background, after what was asked for before."""
        self._executor.submit(self._try, lambda: _trouble_of(call, self.client))

    def close(self) -> None:
        """Send all that waits, whatever went wrong before, and say what stays on disk."""
        self._executor.submit(self._last_attempt)
        self._executor.shutdown(wait=True)
        num_kept = sum(len(outbox) for outbox in self._outboxes)
        for outbox in self._outboxes:
            outbox.close()
        if self._outboxes:
            self._say(f"{num_kept} records of this job have not reached MLflow and are kept on disk; {REMEDY}")
        elif self._complained:
            self._say("all has reached MLflow since")

    def _last_attempt(self) -> None:
        self._quiet_until = 0.0
        for outbox in self._outboxes.copy():
            self._attempt(outbox)

    def _attempt(self, outbox: Outbox) -> None:
        if outbox not in self._outboxes:  # all of it has arrived, with what was sent before
            return
        if len(outbox) or outbox.run_id is None:
            self._try(lambda: outbox.send(self.client))
        if outbox.done:
            outbox.close()
            self._outboxes.remove(outbox)

    def _try(self, attempt: Callable[[], Exception | None]) -> None:
        start = time.monotonic()
        if start < self._quiet_until:
            return
        trouble = attempt()
        if trouble is None:
            return
        if not self._complained:
            self._say(f"MLflow did not take what was sent ({first_line(trouble)}); going on, results are on disk")
            self._complained = True
        if time.monotonic() - start > PATIENCE_SECONDS:
            self._quiet_until = time.monotonic() + SECONDS_BEFORE_RETRY

    def _say(self, words: str) -> None:
        print(f"tracking: {words}", file=sys.stderr)  # noqa: T201  to the user


def unreachable(error: Exception) -> InvalidInputError:
    """Return the error of a tracking store that cannot be reached."""
    return InvalidInputError(
        f"the tracking store must be reachable, and {get_tracking_uri()} is not ({first_line(error)}); start it, "
        "or set MLFLOW_TRACKING_URI=sqlite:///mlflow.db"
    )


def lasting(uri: str) -> str:
    """Return the URI of a store as it holds in every folder and may stand in a file: absolute, without a password."""
    without_password = re.sub(r"(://[^:/@]*):[^@/]*@", r"\1@", uri)
    scheme, _, path = without_password.partition(":///")
    if scheme.partition("+")[0] != "sqlite" or not path:
        return without_password
    return f"{scheme}:///{Path(path).resolve()}"


def try_database(uri: str) -> None:
    """Connect once to a store that is a database, which MLflow would try for minutes; raise where that fails."""
    if uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES:
        url = sqlalchemy.make_url(uri)
        if url.drivername == "sqlite" and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.create_engine(url).connect().close()


def _trouble_of(call: Callable[[MlflowClient], object], client: MlflowClient) -> Exception | None:
    try:
        call(client)
    except Exception as error:  # whatever a store, its driver or its network raises
        return error
    return None
