"""A training that is saved goes on as if it had never ended, on any number of ranks; what cannot go on is refused."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import DIVISIBLE, FOUR_RANKS, tiny
from project import SMALL, Project
from test_data_parallel import losses

from pipeline.runtime.run import execute
from pipeline.training.loop import train
from pipeline.training.saving import Saving

BATCH = {"effective_batch_size": 8, "micro_batch_size": 1, "num_steps": 6, "eval_steps": 0}
FSDP = {"world_size": 2, "sharding": "fsdp"}
REPLICATED = {"world_size": 4, "sharding": "fsdp", "sharding_replicas": 2}
TENSOR = {"world_size": 2, "tensor_parallel": 2}
SKIPS = {"precision": "fp16", "initial_loss_scale": 2.0**40}
"""The scale of the loss decreases in the first steps, which are skipped."""


@pytest.mark.parametrize(
    ("shared", "first", "second"),
    [
        pytest.param({"causal_lm": {**tiny().settings.causal_lm.model_dump(), "dropout": 0.3}}, {}, {}, id="dropout"),
        pytest.param({"optimizer": "muon"}, {}, FSDP, id="one rank, then its parts on two"),
        pytest.param({"sequences": "padded", "weights": "bfloat16_master"}, FSDP, {"world_size": 2}, id="then whole"),
        pytest.param({**SKIPS}, FSDP, {}, id="skipped steps", marks=pytest.mark.slow),
        pytest.param({"adapter": "qlora"}, {"world_size": 2}, {}, id="adapter", marks=pytest.mark.slow),
        *(
            pytest.param({"optimizer": name}, {}, {"world_size": 2}, id=name, marks=pytest.mark.slow)
            for name in ("sgd", "adafactor", "adamw_8bit")
        ),
        pytest.param(
            {"micro_batch_size": 8, "optimizer_in_backward": True, "max_grad_norm": None},
            {},
            {},
            id="updated in the backward pass",
            marks=pytest.mark.slow,
        ),
        pytest.param(DIVISIBLE, TENSOR, {}, id="parts of matrices, then one rank"),
        pytest.param(
            DIVISIBLE, {**TENSOR, "world_size": 4, "sharding": "fsdp"}, TENSOR, id="parts of parts", marks=FOUR_RANKS
        ),
        pytest.param({}, REPLICATED, FSDP, id="two copies, each on two ranks, then one", marks=FOUR_RANKS),
        pytest.param({"adapter": "lora"}, {"world_size": 2}, REPLICATED, id="whole, then two copies", marks=FOUR_RANKS),
    ],
)
def test_a_saved_training_goes_on_as_if_it_had_not_ended(
    shared: dict[str, Any], first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    whole = execute(tiny(**BATCH | shared), tmp_path / "log.txt")
    folder = tmp_path / "saved"
    begun, resumed = (
        execute(
            tiny(**BATCH | shared | settings | {"num_steps": num_steps}),
            tmp_path / "log.txt",
            work=partial(train, saving=saving),
        )
        for settings, num_steps, saving in (
            (first, 3, Saving(folder, every=2)),
            (second, 6, Saving(folder, every=2, resume=folder / "step_3")),
        )
    )
    rel = 0 if first == second else 2e-5  # sums in another order: 1.1e-5 after five updates on one processor
    assert losses(begun) + losses(resumed) == pytest.approx(losses(whole), rel=rel)
    assert [record.step for record in resumed.steps] == [3, 4, 5]
    assert [record.loss_scale for record in resumed.steps] == [record.loss_scale for record in whole.steps[3:]]
    assert [each.name for each in folder.iterdir()] == ["step_6"]


@pytest.fixture(scope="module")
def saved(project: Project) -> Path:
    """Give a training that was saved after its last step."""
    said = project.succeed("main", {**SMALL, "micro_batch_size": "2", "effective_batch_size": "4", "save_every": "3"})
    [folder] = project.folder.glob("runs/*/*/saved/*")
    assert folder.name == "step_4" and f"--resume {folder.relative_to(project.folder)}" in said
    return folder


def test_a_saved_training_goes_on_with_its_own_settings_and_others(project: Project, saved: Path) -> None:
    """Also for a single step, of which no time is known, and in other processes."""
    further = {"num_steps": "5", "world_size": "2", "sharding": "fsdp", "micro_batch_size": "1", "save_every": "9"}
    said = project.succeed("main", {"resume": str(saved), **further})
    assert "after 4 of 5 optimizer steps" in said
    [folder] = project.folder.glob("runs/*/config/saved/*")
    assert folder.name == "step_5"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "which are 4, and num_steps is 4; set it to 5 or more"),
        (
            {"causal_lm.width": "64"},
            "causal_lm.width is 32 in {saved} and 64 here; set causal_lm.width=32, or resume=none",
        ),
        ({"optimizer": "muon"}, "optimizer is adamw in {saved} and muon here"),
        ({"model": "llama-nano"}, "model is gpt2-nano in {saved} and llama-nano here"),
        ({"resume": "nowhere"}, "nowhere must be a readable folder"),
        ({"resume": "damaged"}, "damaged cannot be read as one (__0_0.distcp is too short); name another"),
        ({"resume": "experiments"}, "saved/step_100, and experiments has no config.yaml; name another"),
        ({"resume": "experiments", "config": "best.yaml"}, "resume must be a folder that save_every wrote"),
        ({"save_every": "0"}, "save_every must be greater than 0"),
    ],
)
def test_what_cannot_go_on_is_refused(settings: dict[str, str], message: str, project: Project, saved: Path) -> None:
    damaged = project.folder / "damaged"
    shutil.copytree(saved, damaged, dirs_exist_ok=True)
    (damaged / "__0_0.distcp").write_bytes(b"short")
    shutil.copy(saved / "config.yaml", project.folder / "best.yaml")
    done = project.here("main", {"resume": str(saved), **settings})
    assert done.returncode == 2
    assert message.format(saved=saved) in " ".join(done.stderr.split())
