"""MLflow from one background thread: a store that goes away never stops a training."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# An unreachable server is found out within seconds, not minutes; the user's own choice stands.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import sqlalchemy
from mlflow import MlflowClient
from mlflow.store.db.db_types import DATABASE_ENGINES

PATIENCE_SECONDS = 2.0
"""A call that failed after longer than this made us wait."""
SECONDS_BEFORE_RETRY = 30.0
"""How long a store that made us wait in vain is left alone."""


class Store:
    """MLflow, from one thread and without exceptions: what cannot be sent is said once and left to the local files."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking")
        self._quiet_until = 0.0
        self.num_lost = 0
        """Calls that did not reach the store."""

    def send(self, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Make this call in the background, after those before it."""
        self._executor.submit(self._attempt, call, args, kwargs)

    def send_anyway(self, call: Callable[..., object], *args: Any) -> None:
        """Make this call in the background even to a store that has just made us wait."""
        self._executor.submit(self._attempt, call, args, {}, patient=True)

    def ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any | None:
        """Make this call after those before it and return its answer, None where there is none."""
        return self._executor.submit(self._attempt, call, args, kwargs).result()

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._executor.shutdown(wait=True)

    def _attempt(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], patient: bool = False
    ) -> Any | None:
        start = time.monotonic()
        if start < self._quiet_until and not patient:
            self.num_lost += 1
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not self.num_lost:
                first = (str(error).splitlines() or [type(error).__name__])[0]
                print(  # noqa: T201  to the user
                    f"tracking: MLflow did not take what was sent ({first}); going on, results are on disk",
                    file=sys.stderr,
                )
            self.num_lost += 1
            if time.monotonic() - start > PATIENCE_SECONDS:
                self._quiet_until = time.monotonic() + SECONDS_BEFORE_RETRY
            return None


def try_database(uri: str) -> None:
    """Connect once to a store that is a database, which MLflow would try for minutes; raise where that fails."""
    if uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES:
        url = sqlalchemy.make_url(uri)
        if url.drivername == "sqlite" and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        sqlalchemy.create_engine(url).connect().close()
