"""The view of an experiment with which the MLflow UI opens: its columns, its charts, and the last job's runs in them.

MLflow's UI keeps a view that a person saves or shares as a tag of the experiment, and opens it by the tag's key in the
address. The state is the one that the UI's own "Save view" writes.
"""

import base64
import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.tracking.metric_names import PHASES_MIB, STEP, SUMMARIES

KEY, NAME = "fitproof", "Fitproof: the last job's runs"
TAG = f"mlflow.sharedViewState.{KEY}"
TAG_CHARACTERS = 5000
"""The longest tag of an experiment that MLflow stores."""
RUNS_READ, RUNS_SHOWN, SETTINGS_SHOWN = 1000, 48, 6
"""The latest runs that are looked at; of the last job, the most runs in charts, and the most settings that differ."""
COLUMNS = (
    "peak_allocated_mib",
    "peak_reserved_mib",
    "memory_saving_percent",
    "tokens_per_second",
    "samples_per_second",
    "speedup",
    "final_loss",
    "prediction_error_percent",
)
"""Metrics that the list of runs shows, if any run has them."""
FOLLOWING = ("accumulation_steps", "output", "user_code")
"""Settings that follow from others, or say nothing of the training."""
SECTION = "comparison"
"""The section of the charts below; those that MLflow makes itself are in sections of the metrics' names, folded."""


def save_view(client: MlflowClient, experiment_id: str) -> str:
    """Save the view in the experiment's tags, and return what opens it after the address of the experiment's runs."""
    runs = client.search_runs([experiment_id], order_by=["attributes.start_time DESC"], max_results=RUNS_READ)
    now = int(time.time() * 1000)
    for num_shown in (RUNS_SHOWN, RUNS_SHOWN // 2, 0):
        packed = base64.b64encode(zlib.compress(json.dumps(_state(runs, num_shown)).encode(), 9)).decode()
        tag = json.dumps({"name": NAME, "createdAt": now, "updatedAt": now, "state": f"deflate;{packed}"})
        if len(tag) <= TAG_CHARACTERS:
            client.set_experiment_tag(experiment_id, TAG, tag)
            break
    mode = {"compareRunsMode": "CHART", "workflowType": "machine_learning", "viewStateShareKey": KEY}
    return f"?{urlencode(mode)}"


def _state(runs: Sequence[Run], num_shown: int) -> dict[str, Any]:
    """Return the state of the page of an experiment with these runs, the latest first."""
    children = _of_last_job(runs)[:num_shown]
    measured = {name for run in runs for name in run.data.metrics}
    metrics = [SUMMARIES[name] for name in COLUMNS if SUMMARIES[name] in measured]
    settings = _differing(children)
    columns = [
        *(f"metrics.`{name}`" for name in metrics),
        *(f"params.`{name}`" for name in settings),
        "tags.`outcome`",
    ]
    names = dict.fromkeys((*(name.partition("/")[0] for name in SUMMARIES.values()), STEP.rstrip("/")))
    return {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {},
        "runsExpanded": {run.data.tags["mlflow.parentRunId"]: True for run in children[:1]},
        "runsPinned": [],
        "runsHidden": [],
        "runsHiddenMode": "HIDE_ALL" if children else "FIRST_10_RUNS",
        "runsVisibilityMap": {run.info.run_id: True for run in children},
        "compareRunCharts": list(_charts(metrics, settings)),
        "compareRunSections": [_section(SECTION, is_open=True), *(_section(name, is_open=False) for name in names)],
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


def _of_last_job(runs: Iterable[Run]) -> list[Run]:
    """Return the runs of the job to which the latest run belongs that is one of a job."""
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    return [
        run for run in children if run.data.tags["mlflow.parentRunId"] == children[0].data.tags["mlflow.parentRunId"]
    ]


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which the runs differ, those with the fewest values last."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.data.params.items():
            values.setdefault(name, set()).add(value)
    names = [name for name in values if len(values[name]) > 1 and name not in FOLLOWING]
    return sorted(names, key=lambda name: -len(values[name]))[:SETTINGS_SHOWN]


def _charts(metrics: Sequence[str], settings: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Yield bars of memory, speed and loss, the settings that differ beside both, and memory and loss as lines."""
    peak = next(
        (name for name in (SUMMARIES["peak_reserved_mib"], SUMMARIES["peak_allocated_mib"]) if name in metrics), ""
    )
    speeds = (SUMMARIES["tokens_per_second"], SUMMARIES["samples_per_second"])
    speed = next((name for name in speeds if name in metrics), "")
    found = [name for name in (peak, speed) if name]
    for name in found:
        yield _chart("BAR", name, metricKey=name)
    if settings and found:
        yield _chart("PARALLEL", "settings", selectedParams=list(settings), selectedMetrics=found, showAllRuns=False)
    for name in (f"{STEP}loss", PHASES_MIB):
        yield _chart("LINE", name, **LINE, metricKey=name, selectedMetricKeys=[name])
    for name in (SUMMARIES["final_loss"], SUMMARIES["prediction_error_percent"]):
        if name in metrics:
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


def _section(name: str, *, is_open: bool) -> dict[str, Any]:
    return {
        "uuid": name,
        "name": name,
        "display": is_open,
        "isReordered": False,
        "deleted": False,
        "isGenerated": not is_open,
    }
