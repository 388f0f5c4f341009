"""The tracking store: its address, and whether it can be reached."""

import logging
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

# An unreachable server is detected within seconds instead of minutes; the user's own setting wins.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("PGCONNECT_TIMEOUT", "10")
# What the terminal shows is Fitproof's own.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.tracking import get_tracking_uri

from pipeline.base.errors import InvalidInputError, first_line, has_password, without_passwords
from pipeline.base.results import Outcome

logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs a traceback of what it also raises

STATUS = {
    Outcome.OK: "FINISHED",
    Outcome.OVER_BUDGET: "FINISHED",
    Outcome.OUT_OF_MEMORY: "FAILED",
    Outcome.DIVERGED: "FAILED",
    Outcome.CRASHED: "FAILED",
    Outcome.TIMED_OUT: "FAILED",
    Outcome.INTERRUPTED: "KILLED",
}
"""MLflow's status of a run with this outcome."""
REMEDIES = {
    "error code 401": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "password": "set PGPASSWORD, or write a line for it to ~/.pgpass",
    "No module named 'psycopg": "write postgresql+psycopg:// and pip install '.[postgresql]' in the checkout",
}
"""What to do, by a part of the store's message."""


def hide_credentials() -> None:
    """Move a server's user and password from MLFLOW_TRACKING_URI to the variables that MLflow has for them.

    MLflow prints the URI, and its errors contain it.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and has_password(uri):
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username or "")
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
        os.environ["MLFLOW_TRACKING_URI"] = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def connect() -> MlflowClient:
    """Return a client of the current store, which may be unreachable if it is a server."""
    hide_credentials()
    check_database(get_tracking_uri())
    return MlflowClient()


def check_database(uri: str) -> None:
    """Connect once to a store that is a database, which MLflow would retry for minutes; raise the driver's error."""
    if uri.partition(":")[0].partition("+")[0] not in DATABASE_ENGINES:
        return
    url = sqlalchemy.make_url(uri)
    if url.drivername == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = sqlalchemy.create_engine(url)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def portable_uri(uri: str) -> str:
    """Return a store's URI as it may be written to a file: absolute, and without a password."""
    without_password = without_passwords(uri)
    scheme, _, path = without_password.partition(":///")
    if scheme.partition("+")[0] != "sqlite" or not path:
        return without_password
    return f"{scheme}:///{Path(path).resolve()}"


def address_of(uri: str) -> str:
    """Return the address of the store with this URI: the current one, which has the password, if they agree."""
    current = get_tracking_uri()
    return current if portable_uri(current) == uri else uri


def unreachable(error: Exception) -> InvalidInputError:
    """Return the InvalidInputError of a tracking store that cannot be reached."""
    first = first_line(error)
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in first), "start it")
    return InvalidInputError(
        f"the tracking store must be reachable, and {get_tracking_uri()} is not ({first}); {remedy}, "
        "or set MLFLOW_TRACKING_URI=sqlite:///mlflow.db"
    )


def is_refusal(error: Exception) -> bool:
    """Whether MLflow was reached and will never accept this: an invalid value, or a run that was deleted."""
    return isinstance(error, MlflowException) and error.get_http_status_code() in (400, 404)
