"""The MLflow UI, opened on the runs of the experiment that was used last: `python -m pipeline.tracking.ui PORT`."""

import os
import subprocess
import sys
import time
import urllib.request
import webbrowser
from contextlib import suppress

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.tracking import get_tracking_uri

from pipeline.tracking.experiment import find_or_create
from pipeline.tracking.store import connect, unreachable
from pipeline.tracking.view import save_view

SECONDS_BETWEEN_ATTEMPTS = 0.5
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
"""Environment variables of which Linux sets one where a browser has a screen."""


def main(port: int) -> int:
    """Serve the UI until it is interrupted, and return its exit code; a store that is a server has a UI already."""
    try:
        client, view = connect(), "?workflowType=machine_learning"
        experiment = last_used(client)
        with suppress(MlflowException):  # a server may let nobody change an experiment: it is shown without the view
            view = save_view(client, experiment)
    except Exception as error:  # any error of a store, its driver or its network
        print(f"error: {unreachable(error)}", file=sys.stderr)  # noqa: T201
        return 2
    uri = get_tracking_uri()
    if uri.startswith("http"):
        _show(f"{uri}/#/experiments/{experiment}/runs{view}")
        return 0
    address = f"http://127.0.0.1:{port}"
    words = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    environment = {**os.environ, "MLFLOW_BACKEND_STORE_URI": uri}  # no word of a command: it may have a password
    with subprocess.Popen([sys.executable, "-m", "mlflow", "ui", *words], env=environment) as server:
        try:
            while server.poll() is None and not _answers(address):
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            if server.poll() is None:
                _show(f"{address}/#/experiments/{experiment}/runs{view}")
            return server.wait()
        except KeyboardInterrupt:  # the server has received it too
            server.wait()
            return 0


def last_used(client: MlflowClient) -> str:
    """Return the id of the experiment with the latest run; without runs, of the one that a job would use."""
    ids = [one.experiment_id for one in client.search_experiments()]
    latest = client.search_runs(ids, order_by=["attributes.start_time DESC"], max_results=1)
    return str(latest[0].info.experiment_id) if latest else find_or_create(client)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health") as answer:  # noqa: S310  an address of this machine
            return bool(answer.status == 200)
    except OSError:
        return False


def _show(address: str) -> None:
    """Print the address, and open it where a browser has a screen: one for terminals would take this one."""
    print(f"the runs: {address}", flush=True)  # noqa: T201
    if sys.platform != "linux" or any(os.environ.get(name) for name in DISPLAYS):
        webbrowser.open(address)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
