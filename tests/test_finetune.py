"""The entry point `finetune`: which kinds fit, what each gives, and the search within one of them."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from finished import shorten_finetune
from project import Project
from rich.console import Console
from test_chat import folder_with
from test_tasks import CLIP, RESNET, VIT, folder_of
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.config.entry_points import FOLDER
from pipeline.config.variants import read_yaml
from pipeline.data._support.chat_template import TEMPLATE
from pipeline.jobs.finetune import finetune, make_plan_of_kinds
from pipeline.jobs.finetune_plan import KindsOnCardsSettings, plan_kinds
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import read_findings
from pipeline.searching.results import SearchFindings

SHORT = {
    "device": "cpu",
    "num_steps": "4",
    "num_trials": "2",
    "verify_steps": "0",
    "effective_batch_size": "4",
    "space": '{"micro_batch_size": "divisors"}',
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with weights of a tiny model that differ from random ones, and a tokenizer with a chat template."""
    folder = Path(folder_with(TEMPLATE, tmp_path_factory.mktemp("pretrained")))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project.copy(tmp_path_factory.mktemp("finetune"))
    shorten_finetune(project)
    return project


def findings_of(project: Project, entry: str) -> Any:
    """Return the findings of the newest job of an entry point."""
    return read_findings(max(project.folder.glob(f"runs/*-{entry}-*"), key=lambda folder: folder.stat().st_mtime))


def peak_mib(project: Project, pretrained: Path, **settings: str) -> float:
    """Return the measured peak of a configuration, in MiB."""
    own = {**SHORT, "model": str(pretrained), "causal_lm.pretrained": "true", "corpus": "chat", "sequences": "padded"}
    unused = ("num_trials", "verify_steps", "space")
    words = {name: value for name, value in {**own, **settings}.items() if name not in unused}
    project.succeed("main", {**words, "sequence_length": "64"})
    [row] = findings_of(project, "main").rows
    return float(row.metrics["peak_allocated_mib"])


def test_a_kind_whose_package_is_not_installed_is_not_counted_among_those_that_do_not_fit(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.techniques.adapter.find_spec", lambda name: None)
    settings = {"model": "gpt2-nano", "gpu": "cpu", "budget": "1GiB", "effective_batch_size": "4", "install": "true"}
    answer = project.succeed("finetune", settings)
    assert re.search(r"On .+ 1 of 1 kinds fit: full \(", answer)
    assert "Not planned: lora (adapter=lora needs the package peft, which is not installed; install it" in answer


@pytest.mark.parametrize("name", ["longest", "install"])
def test_what_is_no_yes_or_no_is_refused(project: Project, name: str) -> None:
    done = project.here("finetune", {"model": "gpt2-nano", "gpu": "cpu", name: "perhaps"})
    assert (
        done.returncode == 2
        and f"{name} must be a valid boolean, unable to interpret input, and is 'perhaps'"
        in " ".join(done.stderr.split())
    )


@pytest.mark.slow
def test_without_a_limit_all_kinds_are_compared_and_the_first_is_searched(project: Project, pretrained: Path) -> None:
    done = project.here("finetune", {**SHORT, "model": str(pretrained), "budget": "1GiB"})
    assert done.returncode == 0, done.stderr
    compared: ComparisonFindings = findings_of(project, "finetune")
    assert [row.name for row in compared.rows] == ["full", "lora"]
    full, lora = compared.rows
    assert full.result is not None and lora.result is not None
    assert full.result.outcome is lora.result.outcome is Outcome.OK
    assert full.params["causal_lm.pretrained"] is True
    assert full.note is None  # its checkpoint is in float32
    assert "other trainings beside AdamW on all weights in float32" in done.stdout
    assert full.result.steps[0].loss == pytest.approx(lora.result.steps[0].loss)  # an adapter adds nothing at first
    assert {"eval_loss", "peak_allocated_mib", "tokens_per_second"} <= set(full.metrics) & set(lora.metrics)
    searched: SearchFindings = findings_of(project, "search")
    assert searched.best is not None
    assert yaml.safe_load((project.folder / "best.yaml").read_text())["adapter"] == "none"


@pytest.mark.slow
def test_weights_are_those_of_the_folder(project: Project, pretrained: Path) -> None:
    settings = {**SHORT, "model": str(pretrained), "budget": "1GiB", "kind": "lora"}
    losses = {}
    for is_pretrained in ("true", "false"):
        assert project.here("finetune", {**settings, "causal_lm.pretrained": is_pretrained}).returncode == 0
        losses[is_pretrained] = findings_of(project, "finetune").rows[0].result.steps[0].loss
        assert yaml.safe_load((project.folder / "best.yaml").read_text())["adapter"] == "lora"
    assert abs(losses["true"] - losses["false"]) > 0.01


@pytest.mark.slow
def test_a_kind_that_does_not_fit_is_skipped_and_the_next_is_searched(project: Project, pretrained: Path) -> None:
    least = {kind: peak_mib(project, pretrained, micro_batch_size="2", adapter=kind) for kind in ("none", "lora")}
    assert least["lora"] < least["none"]
    budget = f"{(least['none'] + least['lora']) / 2:.3f}MiB"
    project.succeed("finetune", {**SHORT, "model": str(pretrained), "budget": budget})
    lora, full = findings_of(project, "finetune").rows
    assert (lora.name, lora.is_baseline, full.is_baseline) == ("lora", True, False)
    limit = float(budget.removesuffix("MiB"))
    assert (
        full.skipped == f"its smallest configuration needs {least['none']:,.1f} MiB, and the budget is {limit:,.1f} MiB"
    )
    assert lora.metrics["peak_allocated_mib"] <= limit
    assert yaml.safe_load((project.folder / "best.yaml").read_text())["adapter"] == "lora"


@pytest.mark.slow
def test_what_transformers_default_needs_is_beside_full_fine_tuning(tmp_path: Path) -> None:
    """It loads a checkpoint in 16 bits as it is; without float32 AdamW there is no loss to compare theirs with."""
    project = Project.copy(tmp_path / "project")
    file = project.folder / "experiments" / "finetune.yaml"
    values = yaml.safe_load(file.read_text())
    values["kinds"] = {name: values["kinds"][name] for name in ("full", "bfloat16 weights", "8-bit optimizer")}
    values["compared"]["space"] = {"micro_batch_size": [4, 2]}
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    folder = Path(folder_with(TEMPLATE, tmp_path / "model"))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    kinds = {name: {key: str(value) for key, value in kind.items()} for name, kind in values["kinds"].items()}
    least = {name: peak_mib(project, folder, micro_batch_size="2", **kind) for name, kind in kinds.items()}
    budget = f"{(least['full'] + max(least['bfloat16 weights'], least['8-bit optimizer'])) / 2:.3f}MiB"
    said = project.succeed("finetune", {**SHORT, "model": str(folder), "budget": budget})
    rows = {row.name: row for row in findings_of(project, "finetune").rows}
    assert rows["full"].skipped is not None
    assert rows["full"].note == _of_the_default(folder, least["bfloat16 weights"])
    assert [row.note for name, row in rows.items() if name != "full"] == [None, None]
    printed = said
    assert "full: transformers loads" in printed
    assert "which has not been measured here: bfloat16 weights, 8-bit optimizer. So no losses compare." in printed
    assert "8-bit optimizer (3 of 3): ok" in printed


def _of_the_default(folder: Path, needed_mib: float) -> str:
    return (
        f"transformers loads {folder} in bfloat16 by default, and here its weights are float32; with "
        f"weights=bfloat16 it would need {needed_mib:,.1f} MiB"
    )


@pytest.mark.slow
def test_what_transformers_default_needs_is_beside_a_run_and_the_answer_of_a_search(tmp_path: Path) -> None:
    project = Project.copy(tmp_path / "project")
    folder = Path(folder_with(TEMPLATE, tmp_path / "model"))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    size = {"micro_batch_size": "2", "precision": "fp32"}
    least = peak_mib(project, folder, weights="bfloat16", **size)
    assert findings_of(project, "main").rows[0].note is None
    peak_mib(project, folder, **size)
    assert findings_of(project, "main").rows[0].note == _of_the_default(folder, least)
    shared = {**SHORT, "model": str(folder), "causal_lm.pretrained": "true", "corpus": "chat", "sequences": "padded"}
    own = {"sequence_length": "64", "budget": "1GiB", "space": '{"micro_batch_size": [2]}', "num_trials": "1"}
    said = project.succeed("search", {**shared, **own})
    assert f"the answer: {_of_the_default(folder, least)}" in said


def test_nothing_fits(project: Project, pretrained: Path) -> None:
    before = len(list(project.folder.glob("runs/*-search-*")))
    done = project.here("finetune", {**SHORT, "model": str(pretrained), "budget": "1MiB"})
    assert done.returncode == 1
    assert done.stdout.count("skipped, its smallest configuration needs") == 2
    assert len(list(project.folder.glob("runs/*-search-*"))) == before
    frame = pd.read_csv(max(project.folder.glob("runs/*-finetune-*")) / "comparison.csv")
    assert list(frame.outcome) == ["skipped", "skipped"]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "half"}, "kind must be auto or one of full, lora, and is 'half'; set one of them"),
        ({"adapter": "lora"}, "adapter is what the kinds differ in, and adapter=lora would make them another"),
        ({"num_step": "4"}, "num_step"),
        ({"micro_batch_size": "3"}, "micro_batch_size"),
        ({"budget": "much"}, "much"),
        ({"budget": "none"}, "finetune needs a budget, and budget is none; set budget=auto, or one such as 16GiB"),
        (
            {"budget": "2MiB", "model": "gpt2-nano"},
            "full: the parameters must fit the budget: those of gpt2-nano alone",
        ),
        ({"space": '{"adapter": ["none", "lora"]}'}, "adapter is what the kinds differ in"),
        ({"chat.path": "absent.jsonl"}, "absent.jsonl"),
    ],
)
def test_invalid_input_ends_with_one_error(settings: dict[str, str], message: str, project: Project) -> None:
    done = project.here("finetune", {**SHORT, **settings})
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first prediction of a kind fail."""

    def fail(*_: Any) -> None:
        raise AssertionError("a kind was predicted")

    monkeypatch.setattr("pipeline.jobs.finetune.make_plan", fail)


@pytest.mark.usefixtures("nothing_is_predicted")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": "2"}, "num_steps must be more than"),
        ({"effective_batch_size": "4096"}, "must fill one batch"),
        ({"num_trials": "abc"}, "^num_trials"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_run_is_said_before_anything_is_predicted(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        finetune(settings, Console(quiet=True))


@pytest.mark.usefixtures("nothing_is_predicted")
def test_a_kind_that_cannot_run_here_is_refused_before_anything_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.techniques.adapter.find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match="needs the package peft, which is not installed"):
        finetune({"kind": "lora", "model": "gpt2-nano", "device": "cpu"}, Console(quiet=True))


@pytest.mark.usefixtures("nothing_is_predicted")
def test_what_only_some_configurations_can_have_does_not_refuse_a_kind() -> None:
    of_one_pass = {"optimizer_in_backward": True, "max_grad_norm": None}  # the leanest configuration has sixteen
    with pytest.raises(AssertionError, match="a kind was predicted"):
        finetune(
            {"kind": "bfloat16 weights", "model": "gpt2-nano", "device": "cpu", **of_one_pass}, Console(quiet=True)
        )


def test_kinds_go_from_the_least_changed_to_the_smallest() -> None:
    kinds = read_yaml(FOLDER / "finetune.yaml")["kinds"]
    assert next(iter(kinds)) == "full"
    assert kinds["full"] == {}
    assert all(kinds[name] for name in [*kinds][1:])


@pytest.mark.parametrize("values", [VIT, RESNET, CLIP], ids=lambda values: str(values["model_type"]))
def test_kinds_of_a_model_without_the_leanest_levers_are_planned(values: dict[str, Any], tmp_path: Path) -> None:
    space = {"micro_batch_size": [1, 2], "checkpointing": ["none", "every_layer"], "loss_kernel": ["full", "chunked"]}
    shared = {
        "model": folder_of(tmp_path, values),
        "corpus": "random_vectors",
        "effective_batch_size": 2,
        "sequence_length": 64,
    }
    settings = {**shared, "budget": "1GiB"}
    [card] = plan_kinds({"full": {}}, space, settings, KindsOnCardsSettings(gpu="cpu"), shared).cards
    assert card.recommended is not None and {row.choice["loss_kernel"] for row in card.rows} == {"full"}


def test_the_budget_of_a_named_card_is_the_one_that_is_given_or_all_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("budget: 300MiB\n")
    budgets = []
    monkeypatch.setattr("pipeline.jobs.finetune.plan_kinds", lambda *words: budgets.append(words[2].get("budget")))
    for more in ({}, {"budget": "auto"}, {"budget": "none"}, {"budget": "1GiB"}, {"config": str(config)}):
        make_plan_of_kinds({"model": "gpt2-nano", "gpu": "t4", **more})
    assert budgets == [None, None, None, "1GiB", "300MiB"]
