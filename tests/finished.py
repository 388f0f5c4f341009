"""A project in which every entry point has run once, through MLflow, on tiny settings."""

import subprocess
from pathlib import Path

import yaml
from project import SMALL, Project

SEARCH = {**SMALL, "num_steps": "4", "effective_batch_size": "8", "num_trials": "4", "budget": "64MiB"}
ONCE = {**SMALL, "repeats": "0"}
"""Settings of entry points whose variants are not run again, as those of `precision` are."""
SETTINGS = {
    "main": {**SMALL, "config": "experiments/single/optimized.yaml"},
    "profiling": {**SMALL, "config": "experiments/single/optimized.yaml"},
    "precision": SMALL,
    "accumulation": ONCE,
    "checkpointing": {k: v for k, v in ONCE.items() if k != "causal_lm.num_layers"},
    "combined": ONCE,
    "levers": ONCE,
    "search": SEARCH,
    "plan": {**SMALL, "gpu": "cpu", "effective_batch_size": "8"},
}
"""How each entry point is run; `finetune`, which starts a search of its own, has tests of its own."""
IN_A_PROCESS = ("main",)
"""Entry points that the command `mlflow run` runs; of the others MLflow does the same, 12 s faster, in this one."""
Done = dict[str, "subprocess.CompletedProcess[str]"]


KEPT = {"plain", "+ precision", "+ loss", "loss chunked", "loss liger"}
"""Variants of `levers` that run here: two of the ladder, and one that is skipped without a GPU and its package."""


def shorten_levers(project: Project) -> None:
    """Leave few variants in the project's own file of the entry point `levers`."""
    file = project.folder / "experiments" / "levers.yaml"
    values = yaml.safe_load(file.read_text())
    for comparison in values["comparisons"].values():
        comparison["variants"] = {name: own for name, own in comparison["variants"].items() if name in KEPT}
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def shorten_checkpointing(project: Project) -> None:
    """Leave 12 and 24 layers, between which the rule of the depth shows, and a policy that skips layers."""
    file = project.folder / "experiments" / "checkpointing.yaml"
    values = yaml.safe_load(file.read_text())
    del values["comparisons"]["48_layers"], values["comparisons"]["policies"]["variants"]["every_3_layers"]
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def shorten_accumulation(project: Project) -> None:
    """Leave each comparison its baseline and the variant of eight passes."""
    file = project.folder / "experiments" / "accumulation.yaml"
    values = yaml.safe_load(file.read_text())
    for comparison in values["comparisons"].values():
        variants = comparison["variants"]
        comparison["variants"] = {name: variants[name] for name in variants if name.endswith(("x1", "x8"))}
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def shorten_finetune(project: Project) -> None:
    """Leave two kinds, and two configurations of each, in the project's own file of the entry point `finetune`."""
    file = project.folder / "experiments" / "finetune.yaml"
    values = yaml.safe_load(file.read_text())
    values["kinds"] = {name: values["kinds"][name] for name in ("full", "lora")}
    values["compared"]["space"] = {"micro_batch_size": [4, 2]}
    file.write_text(yaml.safe_dump(values, sort_keys=False))


def finish(folder: Path) -> tuple[Project, Done]:
    """Run every entry point once in a copy of the project."""
    project = Project.copy(folder, with_store=False)
    shorten_levers(project)
    shorten_checkpointing(project)
    shorten_accumulation(project)
    done = {}
    for entry, settings in SETTINGS.items():
        run = project.mlflow_run if entry in IN_A_PROCESS else project.mlflow_run_here
        done[entry] = run(entry, settings)
    return project, done
