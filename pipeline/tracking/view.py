"""The view of an experiment with which the MLflow UI opens: its columns, its charts, and the last job's runs in them.

MLflow's UI keeps a view that a person saves or shares as a tag of the experiment, and opens it by the tag's key in the
address. The state is the one that the UI's own "Save view" writes.
"""

import base64
import json
import time
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.tracking.metric_names import PHASES_MIB, STEP, SUMMARIES

KEY, NAME = "fitproof", "Fitproof: the last job's runs"
TAG = f"mlflow.sharedViewState.{KEY}"
NAMED_SINCE = (3, 15)
"""The version of MLflow since which a view has a name; before, the tag holds the state alone."""
RUNS_READ, RUNS_SHOWN, SETTINGS_SHOWN = 1000, 100, 6
"""The latest runs that are looked at, the most runs in a chart, and the most settings that it shows."""
COLUMN_PIXELS = 210
"""Width of a column, so that the names of metrics are not cut."""
COLUMNS = (
    "peak_allocated_mib",
    "peak_reserved_mib",
    "memory_saving_percent",
    "tokens_per_second",
    "speedup",
    "final_loss",
    "prediction_error_percent",
)
"""Metrics that the list of runs shows, if any run has them."""
PEAKS, SPEEDS = ("peak_reserved_mib", "peak_allocated_mib"), ("tokens_per_second", "samples_per_second")
"""What is compared first: the peak that a budget limits, and the speed by which the runs are sorted."""
NOT_SHOWN = ("accumulation_steps", "num_steps", "output", "user_code")
"""Settings that follow from others, or say nothing of what a step costs."""
SECTION = "comparison"
"""The section of the charts below; those that MLflow makes itself are in sections of the metrics' names, folded."""


def save_view(client: MlflowClient, experiment_id: str) -> str:
    """Save the view in the experiment's tags, and return what opens it after the address of the experiment's runs."""
    runs = client.search_runs([experiment_id], order_by=["attributes.start_time DESC"], max_results=RUNS_READ)
    now = int(time.time() * 1000)
    packed = base64.b64encode(zlib.compress(json.dumps(_state(runs)).encode(), 9)).decode()
    view = {"name": NAME, "createdAt": now, "updatedAt": now, "state": f"deflate;{packed}"}
    has_name = tuple(map(int, mlflow.__version__.split(".")[:2])) >= NAMED_SINCE
    client.set_experiment_tag(experiment_id, TAG, json.dumps(view) if has_name else str(view["state"]))
    mode = {"compareRunsMode": "CHART", "workflowType": "machine_learning", "viewStateShareKey": KEY}
    return f"?{urlencode(mode)}"


def _state(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the state of the page of an experiment with these runs, the latest first."""
    parent, children = _last_job(runs)
    measured = {name for run in children or runs for name in run.data.metrics}
    metrics = [SUMMARIES[name] for name in COLUMNS if SUMMARIES[name] in measured]
    settings, (peak, speed) = _differing(children), (_first(names, measured) for names in (PEAKS, SPEEDS))
    columns = [
        *(f"metrics.`{name}`" for name in dict.fromkeys((*metrics, *filter(None, (peak, speed))))),
        *(f"params.`{name}`" for name in settings),
        "tags.`outcome`",
    ]
    names = dict.fromkeys((*(name.partition("/")[0] for name in SUMMARIES.values()), STEP.rstrip("/")))
    return {
        "searchFilter": "" if parent is None else f"tags.mlflow.parentRunId = '{parent}'",
        "orderByKey": f"metrics.`{speed}`" if parent and speed else "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, COLUMN_PIXELS),
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": list(_charts([name for name in (peak, speed) if name], settings)),
        "compareRunSections": [
            {**_section(SECTION), "display": True, "columns": 2},
            *(_section(name) for name in names),
        ],
        "isAccordionReordered": True,
        "viewMaximized": False,
        "runListHidden": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _last_job(runs: Sequence[Run]) -> tuple[str | None, list[Run]]:
    """Return the id and the runs of the job to which the latest run belongs that is one of a job."""
    parents = {run.info.run_id: run.data.tags.get("mlflow.parentRunId") for run in runs}
    parent = next((parent for parent in parents.values() if parent is not None), None)
    return parent, [run for run in runs if parent is not None and parents[run.info.run_id] == parent]


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which the runs differ, those with the fewest values last."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.data.params.items():
            values.setdefault(name, set()).add(value)
    names = [name for name in values if len(values[name]) > 1 and name not in NOT_SHOWN]
    return sorted(names, key=lambda name: -len(values[name]))[:SETTINGS_SHOWN]


def _first(names: Iterable[str], measured: Container[str]) -> str | None:
    """Return the first of these metrics that any run has, by its name in MLflow."""
    return next((SUMMARIES[name] for name in names if SUMMARIES[name] in measured), None)


def _charts(compared: Sequence[str], settings: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield bars of memory and speed, the settings that differ beside both, and memory and loss as lines."""
    for name in compared:
        yield _chart("BAR", name, metricKey=name)
    if settings and compared:
        yield _chart("PARALLEL", "settings", selectedParams=list(settings), selectedMetrics=list(compared))
    for name in (f"{STEP}loss", PHASES_MIB):
        yield _chart("LINE", name, **LINE, metricKey=name, selectedMetricKeys=[name])
    for name in (SUMMARIES["final_loss"], SUMMARIES["prediction_error_percent"]):
        yield _chart("BAR", name, metricKey=name)


LINE: Mapping[str, Any] = {
    "lineSmoothness": 0,
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}
"""How lines are drawn."""


def _chart(kind: str, name: str, **own: Any) -> dict[str, Any]:
    about = {"uuid": f"{KEY}-{name}", "type": kind, "metricSectionId": SECTION, "runsCountToCompare": RUNS_SHOWN}
    return {**about, "deleted": False, "isGenerated": False, **own}


def _section(name: str) -> dict[str, Any]:
    """Return a folded section, to which MLflow adds the charts of metrics whose names begin with its name."""
    return {"uuid": name, "name": name, "display": False, "isReordered": False, "deleted": False, "isGenerated": True}
