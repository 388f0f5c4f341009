"""Every entry point through MLflow, on tiny settings: what it prints, and what it leaves in MLflow."""

import json
import re
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import mlflow
import numpy as np
import optuna
import pandas as pd
import pytest
import yaml
from conftest import PNG
from finished import SETTINGS, Done
from mlflow.entities import Run
from project import SMALL, Project

from pipeline.config.entry_points import SINGLE
from pipeline.report.findings import read_findings
from pipeline.searching.trials import label

SUMMARY = {
    "memory/peak_allocated_mib",
    "memory/peak_process_mib",
    "speed/seconds_per_step",
    "speed/seconds_total",
    "speed/tokens_per_second",
    "speed/samples_per_second",
    "data/tokens_seen",
    "loss/final",
    "loss/mean",
    "loss/std",
    "loss/cv",
    "gradient/mean_norm",
    "gradient/std_norm",
    "gradient/skipped_steps",
    "data/effective_batch_size",
    "memory/predicted_peak_allocated_mib",
    "check/prediction_error_percent",
}
PER_STEP = {"step/loss", "step/grad_norm", "step/seconds", "step/tokens_per_second", "step/learning_rate"}
AGAINST_BASELINE = {
    "memory/saving_percent",
    "speed/time_overhead_percent",
    "speed/time_overhead_low_percent",
    "speed/time_overhead_high_percent",
    "speed/speedup",
    "check/max_loss_difference",
}
TABLES = {
    "main": {"comparison", "single"},
    "profiling": {"cost", "categories", "modules", "tensors", "operators_by_time", "operators_by_memory"},
    "precision": {"comparison", "formats", "stability"},
    "accumulation": {"comparison", "growing_batch", "batch_of_32", "epoch", "smoothness"},
    "checkpointing": {"comparison", "policies", "encoder_stack", "24_layers", "depth"},
    "combined": {"comparison", "ladder"},
    "levers": {"comparison", "alone", "ladder"},
    "plan": {"plan", "largest", "tensors"},  # each with the card's name
    "search": {"trials", "ranking", "verification", "never_run"},
}
POLICIES = ("policies", "encoder_stack", "12_layers", "24_layers")
PICTURES = {
    "main": {"phases", "single"},
    "profiling": {"memory", "modules", "phases", "time"},
    "precision": {"changes_formats", "formats", "stability"},
    "accumulation": {
        "changes_growing_batch",
        "changes_batch_of_32",
        "growing_batch",
        "batch_of_32",
        "smoothness_growing_batch",
        "smoothness_batch_of_32",
    },
    "checkpointing": {"depth", *POLICIES, *(f"changes_{name}" for name in POLICIES)},
    "combined": {"changes_ladder", "ladder", "waterfall"},
    "levers": {"changes_alone", "alone", "ladder", "waterfall"},
    "plan": {"fit"},  # with the card's name
    "search": {"trials_over_time", "memory_against_throughput", "parallel_coordinates"},
}
"""What each entry point's parent run shows."""
OF_SOME_SEARCHES = ("contributions", "may_be_faster", "verified_losses")
"""Pictures of a search whose course was such that there is something to show."""
SKIPPED = ("tf32", "loss liger")
"""Variants that need a GPU."""


@pytest.fixture(scope="module")
def project(finished: tuple[Project, Done]) -> Project:
    return finished[0]


@pytest.fixture(scope="module")
def done(finished: tuple[Project, Done]) -> Done:
    return finished[1]


def same_batch(row: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return bool(row["effective_batch_size"] == other["effective_batch_size"])


def expected_children(entry: str, project: Project) -> list[str]:
    """Return the names of the runs that an entry point starts on a CPU."""
    if entry in SINGLE:
        return ["optimized"]
    file = project.folder / "experiments" / f"{entry}.yaml"
    comparisons = yaml.safe_load(file.read_text())["comparisons"]
    prefix = "" if len(comparisons) == 1 else "{}/"
    names = [(name, variant) for name, c in comparisons.items() for variant in {*c["variants"]} - {*SKIPPED}]
    return [prefix.format(name) + variant for name, variant in names]


def child_of(children: dict[str, Run], comparison: str, variant: str) -> Run:
    """Return the run of a variant; its name holds the comparison where there is more than one."""
    return children.get(variant) or children[f"{comparison}/{variant}"]


def artifacts(project: Project, run_id: str, folder: str | None = None) -> set[str]:
    return {item.path for item in mlflow.MlflowClient(project.store).list_artifacts(run_id, folder)}


def download(project: Project, run_id: str, path: str) -> Path:
    return Path(mlflow.MlflowClient(project.store).download_artifacts(run_id, path))


@pytest.mark.parametrize("entry", SETTINGS)
def test_it_ends_well_with_a_table(entry: str, project: Project, done: Done) -> None:
    assert done[entry].returncode == 0, done[entry].stderr
    assert "MiB" in done[entry].stdout
    assert "Traceback" not in done[entry].stderr
    parent = project.parent_of(entry)
    assert parent.info.status == "FINISHED"
    assert str(parent.info.run_name).startswith(f"{entry} gpt2-nano")
    assert parent.data.tags["mlflow.project.entryPoint"] == entry


@pytest.mark.parametrize("entry", [entry for entry in SETTINGS if entry not in ("plan", "search")])
def test_each_variant_is_a_child_with_all_that_was_measured(entry: str, project: Project, done: Done) -> None:
    children = project.children_of(project.parent_of(entry))
    assert sorted(children) == sorted(expected_children(entry, project))
    client = mlflow.MlflowClient(project.store)
    for name, run in children.items():
        assert run.info.status == "FINISHED"
        tags = run.data.tags
        assert tags["technique"] == entry
        assert name in (tags["variant"], f"{tags.get('comparison')}/{tags['variant']}")
        assert (tags["outcome"], tags["device"], tags["allocator"]) == ("ok", "cpu", "default")
        assert {"torch", "transformers", "device_name"} <= set(tags)
        assert set(run.data.metrics) >= SUMMARY | PER_STEP
        assert "memory/peak_reserved_mib" not in run.data.metrics
        history = client.get_metric_history(run.info.run_id, "step/loss")
        assert [point.step for point in history] == [0, 1, 2, 3]
        assert run.data.metrics["loss/final"] == history[-1].value
        assert {point.step for name in SUMMARY for point in client.get_metric_history(run.info.run_id, name)} == {0}
        phases = client.get_metric_history(run.info.run_id, "memory/over_the_step_mib")
        assert [point.step for point in phases] == [*range(7)], "loading, and three phases of two optimizer steps"
        peak = f"peak {run.data.metrics['memory/peak_allocated_mib']:,.1f} MiB"
        assert tags["variant"] in tags["mlflow.note.content"] and f"Outcome ok: {peak}" in tags["mlflow.note.content"]
        assert artifacts(project, run.info.run_id) >= {"config.yaml", "result.json"}
        if run.data.params["precision"] == "fp32":  # in 16 bits oneDNN's workspace shows in peaks of a few MiB
            assert abs(run.data.metrics["check/prediction_error_percent"]) < 1.5
        [dataset] = run.inputs.dataset_inputs
        assert dataset.dataset.name == run.data.params["corpus"]


@pytest.mark.parametrize("entry", ["precision", "accumulation", "checkpointing", "combined", "levers"])
def test_variants_are_measured_against_their_baseline(entry: str, project: Project, done: Done) -> None:
    frame = pd.read_csv(download(project, project.parent_of(entry).info.run_id, "comparison.csv"))
    children = project.children_of(project.parent_of(entry))
    for comparison, rows in frame[frame.outcome != "skipped"].groupby("comparison"):
        [baseline] = rows[rows.baseline].to_dict("records")
        for row in rows[~rows.baseline].to_dict("records"):
            metrics = child_of(children, comparison, row["variant"]).data.metrics
            saving = 100 * (1 - row["peak_allocated_mib"] / baseline["peak_allocated_mib"])
            assert metrics["memory/saving_percent"] == pytest.approx(saving)
            assert metrics["speed/speedup"] == pytest.approx(row["samples_per_second"] / baseline["samples_per_second"])
            expected = (
                AGAINST_BASELINE if same_batch(row, baseline) else AGAINST_BASELINE - {"check/max_loss_difference"}
            )
            assert set(metrics) & AGAINST_BASELINE == expected
            assert not AGAINST_BASELINE & set(child_of(children, comparison, baseline["variant"]).data.metrics)


@pytest.mark.parametrize("entry", SETTINGS)
def test_the_parent_has_tables_figures_a_page_and_the_environment(entry: str, project: Project, done: Done) -> None:
    run_id = project.parent_of(entry).info.run_id
    expected = {"environment.json", "plots", "findings.json", "report.html", *(f"{n}.csv" for n in TABLES[entry])}
    assert {re.sub(r"(plan|largest|tensors)_.*csv", r"\1.csv", name) for name in artifacts(project, run_id)} >= expected
    plots = artifacts(project, run_id, "plots")
    found = {re.sub(r"(fit|breakdown)_.*png", r"\1.png", name) for name in plots}
    # A search may know no way from the baseline to its answer, and leave nothing to predict.
    found -= {f"plots/{name}.png" for name in OF_SOME_SEARCHES}
    assert found == {f"plots/{name}.png" for name in PICTURES[entry]}
    for plot in plots:
        assert download(project, run_id, plot).read_bytes().startswith(PNG)
    assert f"/runs/{run_id}" in download(project, run_id, "report.html").read_text()
    environment = json.loads(download(project, run_id, "environment.json").read_text())
    assert {"torch", "transformers", "mlflow", "optuna", "python", "processor", "cores"} <= set(environment)


def test_exact_params_of_one_run(project: Project, done: Done) -> None:
    _, run = project.only_run("main")
    assert run.data.params == {
        "model": "gpt2-nano",
        "task": "none",
        "corpus": "python_docs",
        "sequences": "packed",
        "sequence_length": "32",
        "vocabulary_size": "512",
        "device": "cpu",
        "seed": "0",
        "num_steps": "4",
        "num_epochs": "none",
        "timing_warmup_steps": "3",
        "learning_rate": "0.0005",
        "learning_rate_scaling": "none",
        "base_batch_size": "8",
        "learning_rate_warmup_steps": "5",
        "learning_rate_warmup_ratio": "none",
        "learning_rate_schedule": "constant",
        "weight_decay": "0.01",
        "max_grad_norm": "1.0",
        "eval_steps": "1",
        "gradient_underflow": "False",
        "dataset_size": "10000",
        "budget": "none",
        "time_limit": "none",
        "output": "runs",
        "micro_batch_size": "2",
        "accumulation_steps": "4",
        "effective_batch_size": "8",
        "world_size": "1",
        "activation_offloading": "False",
        "attention": "sdpa",
        "checkpointing": "every_layer",
        "compile": "none",
        "expandable_segments": "False",
        "gelu": "model",
        "loss_kernel": "full",
        "optimizer_in_backward": "False",
        "optimizer": "adamw",
        "sharding": "none",
        "tensor_parallel": "1",
        "weights": "float32",
        "adapter": "none",
        "precision": "bf16",
        "initial_loss_scale": "65536.0",
        "causal_lm.pretrained": "False",
        "causal_lm.num_layers": "2",
        "causal_lm.width": "32",
        "causal_lm.num_heads": "2",
        "causal_lm.vocabulary_size": "none",
        "causal_lm.dropout": "none",
    }
    assert run.data.metrics["speed/block_forwards_per_step"] == 4 * (2 + 2)
    assert run.data.metrics["data/tokens_seen"] == 4 * 8 * 32
    assert run.data.metrics["data/effective_batch_size"] == 8


def test_precision_reports_stability_and_skips_tf32_with_the_reason(project: Project, done: Done) -> None:
    assert "tf32: skipped, tf32 needs a CUDA GPU" in " ".join(done["precision"].stdout.split())
    parent = project.parent_of("precision")
    stability = pd.read_csv(download(project, parent.info.run_id, "stability.csv")).set_index("variant")
    assert list(stability.index) == ["fp32", "fp16", "bf16"]
    assert stability["last loss scale"].notna().to_dict() == {"fp32": False, "fp16": True, "bf16": False}
    assert stability["gradient lost in unscaled fp16 %"].between(0, 100).all()
    fp16 = project.children_of(parent)["fp16"]
    assert fp16.data.metrics["step/loss_scale"] == 65536.0


def test_accumulation_counts_passes_and_updates(project: Project, done: Done) -> None:
    parent = project.parent_of("accumulation")
    epoch = pd.read_csv(download(project, parent.info.run_id, "epoch.csv")).set_index("variant")
    assert epoch["forward passes"].to_dict() == {"2x1": 5000, "2x8": 5000, "32x1": 313, "4x8": 2500}
    assert epoch["updates"].to_dict() == {"2x1": 5000, "2x8": 625, "32x1": 313, "4x8": 313}
    assert (epoch["s/step modelled"].dropna() > 0).all()
    smoothness = pd.read_csv(download(project, parent.info.run_id, "smoothness.csv"))
    assert (smoothness["loss std"] > 0).all()


def test_checkpointing_stands_beside_theory(project: Project, done: Done) -> None:
    depth = pd.read_csv(download(project, project.parent_of("checkpointing").info.run_id, "depth.csv"))
    by_depth = depth[depth.variant == "every_layer"].set_index("comparison")
    assert by_depth["layers"].to_dict() == {
        "policies": 4,
        "encoder_stack": 6,
        "12_layers": 12,
        "24_layers": 24,
    }
    assert by_depth.loc["24_layers", "theory %"] == pytest.approx(100 * (24**-0.5 - 1))
    assert (by_depth["block forwards"] == 2 * by_depth["without checkpointing"]).all()
    assert by_depth.loc["24_layers", "memory %"] < by_depth.loc["12_layers", "memory %"] < 0
    assert (depth["largest loss difference"] < 1e-5).all()


@pytest.mark.parametrize("entry", [entry for entry in SETTINGS if entry not in ("plan", "search")])
def test_a_parent_has_the_metrics_of_its_fastest_run(entry: str, project: Project, done: Done) -> None:
    parent = project.parent_of(entry)
    children = project.children_of(parent).values()
    runs = [run.data.metrics for run in children]
    best = max(children, key=lambda run: run.data.metrics["speed/tokens_per_second"])
    fastest = best.data.metrics
    assert parent.data.params["answer/micro_batch_size"] == best.data.params["micro_batch_size"]
    for name in ("speed/tokens_per_second", "speed/seconds_per_step", "memory/peak_allocated_mib", "loss/final"):
        assert parent.data.metrics[name] == fastest[name]
    savings = [metrics["memory/saving_percent"] for metrics in runs if "memory/saving_percent" in metrics]
    assert parent.data.metrics.get("memory/largest_saving_percent") == max(savings, default=None)
    low, high = "speed/time_overhead_low_percent", "speed/time_overhead_high_percent"
    speedups = [metrics["speed/speedup"] for metrics in runs if low in metrics and metrics[low] * metrics[high] > 0]
    assert parent.data.metrics.get("speed/largest_speedup") == pytest.approx(max(speedups, default=None))


def test_the_parent_of_a_plan_has_the_metrics_of_what_it_recommends(project: Project, done: Done) -> None:
    metrics = project.parent_of("plan").data.metrics
    [file] = project.folder.glob("runs/*-plan-*/findings.json")
    [card] = json.loads(file.read_text())["cards"]
    fitting = [row for row in card["rows"] if row["fits"]]
    speeds = [row["tokens"] / row["seconds"] for row in fitting]
    assert metrics["check/num_configurations_that_fit"] == len(fitting) > 0
    assert metrics["speed/predicted_tokens_per_second"] == pytest.approx(max(speeds))


def test_the_study_opens_in_optunas_dashboard(project: Project, done: Done) -> None:
    import optuna_dashboard

    asked: dict[str, Any] = {}
    setup_testing_defaults(asked)
    storage = optuna.storages.get_storage(f"sqlite:///{project.folder}/optuna.db")
    application = optuna_dashboard.wsgi(storage)

    def get(path: str) -> Any:
        answer = application({**asked, "PATH_INFO": path, "QUERY_STRING": "after=0"}, lambda *_: None)
        return json.loads(b"".join(answer))

    [summary] = get("/api/studies")["study_summaries"]
    study = get(f"/api/studies/{summary['study_id']}")
    assert study["objective_names"] == ["tokens per second"]
    complete = [trial for trial in study["trials"] if trial["state"] == "Complete"]
    assert len(complete) == len(study["trials"]) in (4, 5)
    for trial in complete:
        steps = [value["step"] for value in trial["intermediate_values"]]
        assert steps in ([0, 1, 2, 3], [0, 2, 4, 6])  # every second one of the verification's eight
        attributes = {one["key"]: one["value"] for one in trial["user_attrs"]}
        assert float(attributes["peak_allocated_mib"]) > 0 and float(attributes["seconds_per_step"]) > 0
        assert float(attributes["bytes_over_budget"]) <= 0


def test_the_search_answers_and_its_answer_runs(project: Project, done: Done) -> None:
    assert "The fastest that fits 64.0 MiB at an effective batch of 8" in " ".join(done["search"].stdout.split())
    parent = project.parent_of("search")
    runs = pd.read_csv(download(project, parent.info.run_id, "trials.csv"))
    trials = runs[runs["run"].str.startswith("trial")]
    verifying = {*runs["run"]} - {*trials["run"]}  # of more than one answer, where a run was slowed by others
    assert verifying and all(re.fullmatch(r"verification( \d+)?: (answer|plain)", run) for run in verifying)
    assert len(trials) in (4, 5)  # the verification adds the plain configuration where it had no trial
    [findings] = project.folder.glob("runs/*-search-*/findings.json")
    found = json.loads(findings.read_text())
    checked, bound, gap = found["verification"], found["certificate"]["bound"], found["certificate"]["gap"]
    of_answer = [trials[name] == value for name, value in checked["answer"]["choice"].items()]
    best = trials[np.logical_and.reduce(of_answer)].iloc[0]
    answer = read_findings(findings.parent).best  # by all runs of that configuration, the verification's too
    assert parent.data.metrics["speed/tokens_per_second"] == pytest.approx(answer.tokens_per_second)
    assert parent.data.metrics["speed/speedup"] > 0
    in_params = {name: parent.data.params[f"answer/{name}"] for name in answer.choice}
    assert not {"micro_batch_size", "accumulation_steps"} & parent.data.params.keys()  # of no trial in particular
    assert in_params == {name: str(value) for name, value in answer.choice.items()}
    assert parent.data.metrics.get("check/bound_percent") == (
        None if bound is None else pytest.approx(100 * max(bound, gap))
    )
    children = project.children_of(parent)
    roles = {name.partition(":")[0].removesuffix(" (measured again)") for name in children}
    assert {role for role in roles if "verification" not in role} == {f"trial {n}" for n in range(1, 5)}
    verified = rf"verification( \d+)?: answer: {re.escape(label(checked['answer']['choice']))}"
    assert any(re.fullmatch(verified, name) for name in children)
    assert checked["answer"]["outcome"] == checked["plain"]["outcome"] == "ok"
    assert checked["max_loss_difference"] <= checked["tolerance"]
    assert best.fits
    assert trials.predicted_seconds_per_step.notna().sum() == 3  # all but the first
    config = yaml.safe_load((project.folder / "best.yaml").read_text())
    assert config["micro_batch_size"] == best["micro_batch_size"]
    assert config["effective_batch_size"] == 8
    again = project.mlflow_run_here("main", {"config": "best.yaml"})
    assert again.returncode == 0, again.stderr
    _, run = project.only_run("main")
    assert run.data.metrics["memory/peak_allocated_mib"] == pytest.approx(best["peak_allocated_mib"])


def test_a_logged_config_runs_again_with_the_same_losses(project: Project, done: Done) -> None:
    first = project.children_of(project.parent_of("combined"))["all three"]
    config = download(project, first.info.run_id, "config.yaml")
    project.succeed("main", {"config": str(config)})
    _, run = project.only_run("main")
    assert run.data.metrics["loss/final"] == first.data.metrics["loss/final"]
    assert run.data.params == first.data.params


def test_results_are_on_local_disk_too(project: Project, done: Done) -> None:
    results = sorted(project.folder.glob("runs/*-combined-*/*/result.json"))
    assert len(results) == 8
    for file in results:
        content = json.loads(file.read_text())
        assert content["result"]["outcome"] == "ok"
        assert content["metrics"]["final_loss"] == content["result"]["steps"][-1]["loss"]
    assert not list(project.folder.glob("runs/**/*.part"))


def test_variants_whose_names_differ_in_signs_have_folders_of_their_own(tmp_path: Path) -> None:
    project = Project.copy(tmp_path / "project")
    variants = {name: {} for name in ("batch <= 2", "batch > 2", "..")}
    comparison = {"baseline": "..", "variants": variants}
    values = {"question": "Which?", "comparisons": {"signs": comparison}}
    (project.folder / "experiments" / "signs.yaml").write_text(yaml.safe_dump(values))
    project.succeed("signs", {**SMALL, "repeats": "0"})
    steps = [file.read_text().splitlines() for file in project.folder.glob("runs/*-signs-*/*/steps.jsonl")]
    assert [len(lines) for lines in steps] == [4, 4, 4]
