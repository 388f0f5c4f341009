"""The use of the machine while a job runs, which MLflow itself measures and logs where its own switch is on."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING


@contextmanager
def system_metrics(run_id: str) -> Iterator[None]:
    """Let MLflow log processors, memory, GPUs and network to a run, if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING is true.

    MLflow does so by itself only for runs that mlflow.start_run() has started.
    """
    if not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id)
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()
