"""Reports of runs that MLflow already has: selected, named, and flagged if they are not comparable."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from finished import Done
from project import Project, parent_id

from pipeline.base.errors import InvalidInputError
from pipeline.report.findings import read_findings
from pipeline.tracking.history import History
from pipeline.tracking.metric_names import SUMMARIES


@pytest.fixture(scope="module")
def project(finished: tuple[Project, Done], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a copy of the finished project's store, to which runs may be added."""
    copy = Project.copy(tmp_path_factory.mktemp("compare"), with_store=False)
    with (
        closing(sqlite3.connect(finished[0].folder / "mlflow.db")) as store,
        closing(sqlite3.connect(copy.folder / "mlflow.db")) as other,
    ):
        store.backup(other)  # another test may be writing there
    return copy


def table(project: Project, name: str) -> pd.DataFrame:
    """Return a table of the newest comparison."""
    run_id = project.parent_of("compare").info.run_id
    return pd.read_csv(mlflow.MlflowClient(project.store).download_artifacts(run_id, f"{name}.csv"))


def test_a_parent_stands_for_its_children_and_gives_its_table_again(project: Project) -> None:
    parent = project.parent_of("combined")
    done = project.mlflow_run_here("compare", {"runs": parent.info.run_id})
    assert done.returncode == 0, done.stderr
    frame = table(project, "comparison").set_index("variant")
    children = project.children_of(parent)
    assert set(frame.index) == set(children)
    for name, child in children.items():
        for metric in ("peak_allocated_mib", "seconds_per_step", "final_loss", "memory_saving_percent"):
            measured = child.data.metrics.get(SUMMARIES[metric], float("nan"))
            assert frame.loc[name].get(metric) == pytest.approx(measured, nan_ok=True)
    differing = set(table(project, "differences")["setting"])
    assert differing == {"precision", "micro_batch_size", "accumulation_steps", "checkpointing"}


def test_every_figure_and_step_comes_back_from_mlflow(
    finished: tuple[Project, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, _ = finished
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.store)
    parent = project.parent_of("precision")
    history = History()
    [folder] = project.folder.glob("runs/*-precision-*")
    kept = {row.name: row for row in read_findings(folder).rows}  # type: ignore[union-attr]
    runs = history.by_id([parent.info.run_id])
    assert len(runs) == 3
    for run in runs:
        row, own = history.row(run, False, run.info.run_name, "runs"), kept[run.info.run_name]
        assert row.metrics == pytest.approx(dict(own.metrics))
        assert own.params.items() <= row.params.items()
        assert row.result is not None and own.result is not None
        for one, other in zip(row.result.steps, own.result.steps, strict=True):
            assert (one.step, one.loss, one.loss_scale, one.skipped) == (
                other.step,
                other.loss,
                other.loss_scale,
                other.skipped,
            )
            assert one.tokens == other.tokens


def test_techniques_side_by_side_are_told_apart_and_flagged(project: Project) -> None:
    choice = "params.checkpointing = 'none' and params.precision = 'fp32'"
    done = project.mlflow_run_here("compare", {"experiment": "Default", "filter": choice})
    assert done.returncode == 0, done.stderr
    rows = table(project, "comparison")
    assert {"combined: fp32", "accumulation: growing_batch/2x8"} <= set(rows["variant"])
    flags = table(project, "not_comparable").set_index("run")["other"]
    assert rows["variant"].iloc[0] not in flags
    assert {"effective batch", "corpus, effective batch, model"} <= set(flags)
    plain = set(rows["variant"][rows["effective_batch_size"] == rows["effective_batch_size"].iloc[0]])
    assert not any("effective batch" in flag for name, flag in flags.items() if name in plain)


def test_a_run_of_another_device_or_corpus_is_not_measured_against_the_baseline(project: Project) -> None:
    client = mlflow.MlflowClient(project.store)
    runs = [run for run in project.runs() if run.data.tags.get("technique") == "combined" and parent_id(run)]
    other = client.create_run(runs[0].info.experiment_id, run_name="elsewhere")
    for key, value in {**runs[0].data.params, "corpus": "quick_fox"}.items():
        client.log_param(other.info.run_id, key, value)
    for key, value in runs[0].data.metrics.items():
        client.log_metric(other.info.run_id, key, value)
    client.set_tag(other.info.run_id, "device_name", "another card")
    client.set_tag(other.info.run_id, "outcome", "ok")
    ids = f"{runs[0].info.run_id},{other.info.run_id}"
    project.succeed("compare", {"runs": ids})
    [flag] = table(project, "not_comparable")["other"]
    assert flag == "corpus, device"
    assert "memory_saving_percent" not in table(project, "comparison").columns


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "compare needs runs"),
        ({"experiment": "nope"}, "no experiment is called 'nope'; the experiments are Default"),
        ({"runs": ","}, "runs must have an id, and is ','"),
        ({"runs": "abc"}, "no run has the id 'abc'"),
        ({"filter": "foo =="}, "filter must be a filter string of MLflow"),
        ({"filter": "params.precision = 'fp7'"}, "none has any; widen the selection"),
        ({"runs": "a", "filter": "b"}, "runs are selected by id, or by experiment and filter"),
        ({"experiment": "Default", "baseline": "abc"}, "the baseline must be one of the runs compared"),
        ({"rums": "abc"}, "no setting is called rums; did you mean runs"),
    ],
)
def test_a_wrong_choice_is_answered(settings: dict[str, str], words: str, project: Project) -> None:
    before = len(project.runs())
    done = project.here("compare", settings)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr and len(done.stderr.strip().splitlines()) <= 2
    assert len(project.runs()) == before


def test_a_run_without_metrics_is_refused_by_name(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow.MlflowClient(project.store)
    empty = client.create_run("0", run_name="empty").info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.store)
    with pytest.raises(InvalidInputError, match=f"empty \\({empty}\\) has neither; leave it out"):
        History().by_id([empty])


def test_a_page_is_made_again_from_the_folder(finished: tuple[Project, Done], tmp_path: Path) -> None:
    project, done = finished
    for entry in done:
        folder = min(project.folder.glob(f"runs/*-{entry}-*"))  # later ones may be running: other tests start them
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        before = (copy / "report.html").read_bytes()
        (copy / "report.html").unlink()
        project.succeed("report", {"folder": str(copy)})
        assert (copy / "report.html").read_bytes() == before
    wrong = project.here("report", {"folder": str(tmp_path)})
    assert wrong.returncode == 2 and "a report is made from the findings.json of a finished job" in wrong.stderr
