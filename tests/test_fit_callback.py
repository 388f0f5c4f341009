"""`FitCallback`: in loops of people's own, in transformers' Trainer and in Lightning's, on simulated cards."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from conftest import ROOT
from project import Project, new_store
from test_simulate import CUDA_PYTHON, needs_cuda_build

from fitproof import FitCallback, InvalidInputError
from pipeline.simulation.cards import find_card
from pipeline.simulation.environment import environment

START = """
import os, sys
import torch
from torch import nn
from fitproof import FitCallback

print(os.getpid(), file=open("starts", "a"))
"""
OF_FRAMEWORK = {
    "loop": """
import mlflow

mlflow.start_run()
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
with FitCallback():
    for _ in range(4):
        model(torch.ones(4096, 512, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step")
mlflow.end_run()
""",
    "transformers": """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments("trained", max_steps=4, report_to="mlflow", save_strategy="no", disable_tqdm=True)
data = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 32
Trainer(model, arguments, train_dataset=data, callbacks=[FitCallback(values="on")]).train()
""",
    "lightning": """
import lightning
from lightning.pytorch.loggers import MLFlowLogger


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def training_step(self, batch, index):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


logger = MLFlowLogger("trained", tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
loader = torch.utils.data.DataLoader(torch.ones(64, 512), batch_size=16)
settings = {"max_steps": 4, "devices": 1, "enable_checkpointing": False, "enable_progress_bar": False}
lightning.Trainer(logger=logger, callbacks=[FitCallback(values="on")], **settings).fit(Net(), loader)
""",
}
OWN_PROCESS = """
import torch

weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    weight.sum().backward()
    optimizer.step()
"""
END = """
print("peaks", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty folder whose processes log to its own store."""
    project = Project(tmp_path)
    new_store(tmp_path)
    for name, value in {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": project.store}.items():
        monkeypatch.setenv(name, value)
    return project


def train(project: Project, script: str, *, gpu: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a training in the folder, on a simulated card or without any."""
    (project.folder / "train.py").write_text(START + script + END)
    card = {} if gpu is None else environment(find_card(gpu), python=CUDA_PYTHON)
    command = [sys.executable if gpu is None else str(CUDA_PYTHON), "train.py"]
    return subprocess.run(
        command, cwd=project.folder, env={**os.environ, **card}, capture_output=True, text=True, timeout=600
    )


def lines_of(text: str) -> list[str]:
    return [line.removeprefix("Fitproof: ") for line in text.splitlines() if line.startswith("Fitproof: ")]


@needs_cuda_build
@pytest.mark.matrix(1)
@pytest.mark.parametrize("framework", ["loop", "transformers", "lightning"])
def test_a_training_is_told_its_peaks_before_and_beside_what_it_measured(framework: str, project: Project) -> None:
    pytest.importorskip("torch" if framework == "loop" else framework)
    done = train(project, OF_FRAMEWORK[framework], gpu="rtx4090")
    assert done.returncode == 0, done.stderr
    first, said, compared = lines_of(done.stderr)
    assert first.endswith("train.py` on a simulated NVIDIA GeForce RTX 4090 first")
    assert said.startswith("Fits NVIDIA GeForce RTX 4090, with ")
    [peaks] = re.findall(r"^peaks (\d+) (\d+)$", done.stdout, re.MULTILINE)
    allocated, reserved = (int(peak) / 2**20 for peak in peaks)
    shown = f"{allocated:,.1f} MiB allocated and {reserved:,.1f} MiB reserved"
    assert compared == f"predicted {shown}, measured {shown}: +0.00 % allocated."
    starts = (project.folder / "starts").read_text().split()
    assert len(starts) == 2  # this one and the simulated one, which starts none
    own = [run for run in project.runs() if run.data.metrics.get("memory/peak_allocated_mib")]
    [metrics] = [run.data.metrics for run in own]
    assert [run.info.status for run in own] == ["FINISHED"]
    assert {run.info.status for run in project.runs()} <= {"FINISHED", "KILLED"}
    names = [f"{which}_{kind}_mib" for which in ("peak", "predicted_peak") for kind in ("allocated", "reserved")]
    assert [metrics[f"memory/{name}"] for name in names] == [allocated, reserved, allocated, reserved]
    assert metrics["check/prediction_error_percent"] == 0


@pytest.mark.slow
@needs_cuda_build
def test_a_training_that_does_not_fit_another_card_is_stopped_before_its_first_step(project: Project) -> None:
    settings = 'FitCallback("stop", gpu="a100", budget="40MiB")'
    done = train(project, OF_FRAMEWORK["loop"].replace("FitCallback()", settings))
    assert done.returncode == 1 and "step" not in done.stdout
    assert re.search(r"DoesNotFitError: Does not fit NVIDIA A100.*: train.py:\d+ asks for", done.stderr)
    [run] = project.runs()
    assert run.data.metrics.keys() == {
        "memory/predicted_peak_allocated_mib",
        "memory/predicted_peak_reserved_mib",
    }


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Give what makes a callback in a process that has not trained yet."""
    monkeypatch.setattr(FitCallback, "_has_begun", False)
    return FitCallback


def test_what_cannot_be_predicted_is_said_and_the_training_goes_on(
    fresh: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for _ in range(2):
        with fresh("stop"):
            pass
    monkeypatch.setattr(FitCallback, "_has_begun", False)
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    with fresh(gpu="t4"):
        pass
    first, second, third = lines_of(capsys.readouterr().err)
    assert first.startswith("it is not known whether this run fits: there is no GPU; name one")
    assert second.endswith("only the first training of a process can be simulated, and this is another")
    assert "a session without a file has none" in third


@pytest.mark.filterwarnings("ignore")  # of the frameworks themselves
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_trainer_calls_it(
    framework: str, fresh: Callable[..., Any], capsys: pytest.CaptureFixture[str], project: Project, monkeypatch: Any
) -> None:
    pytest.importorskip(framework)
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(FitCallback, "_end", lambda self: sys.stderr.write("the end\n"))
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)  # which both set for good
    exec(START + OF_FRAMEWORK[framework], {"__name__": framework})
    said = capsys.readouterr().err
    [first] = lines_of(said)
    assert first.startswith("it is not known whether this run fits: there is no GPU")
    assert said.count("the end\n") == 1 and said.index(first) < said.index("the end")
    assert mlflow.active_run() is None


@needs_cuda_build
def test_a_process_whose_children_train_ends_and_says_that_nothing_was_measured(
    fresh: Callable[..., Any], capsys: pytest.CaptureFixture[str], train_py: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_py.write_text(OWN_PROCESS)
    monkeypatch.setattr("pipeline.jobs.fit_callback._own_card", lambda: {"gpu": "t4"})
    with fresh(command=f"{CUDA_PYTHON} train.py"):
        pass
    *_, said, compared = lines_of(capsys.readouterr().err)
    assert said.startswith("Fits Tesla T4, with ")
    assert compared.endswith(" MiB reserved, and nothing was measured: this process itself used no GPU.")


def test_a_process_that_is_simulated_or_measured_already_predicts_nothing(
    fresh: Callable[..., Any], capsys: pytest.CaptureFixture[str], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.store)
    for variable in ("SIMULATED_CARD_REPORT", "COMMAND_SOCKET"):
        with monkeypatch.context() as patch, mlflow.start_run() as run:
            patch.setenv(variable, "there")
            with fresh(gpu="a100"):
                assert mlflow.get_run(run.info.run_id).info.status == "KILLED"  # as its process may end at any step
    assert not lines_of(capsys.readouterr().err)


def test_it_is_a_callback_of_each_framework_and_can_be_pickled() -> None:
    from lightning.pytorch.callbacks import Callback
    from transformers import TrainerCallback

    for one in (FitCallback("stop", gpu="a100"), pickle.loads(pickle.dumps(FitCallback("stop", gpu="a100")))):
        assert isinstance(one, FitCallback) and isinstance(one, TrainerCallback) and isinstance(one, Callback)
        assert one._action == "stop"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action": "end"}, "action must be warn or stop, not 'end'"),
        ({"gpu": "a1000x"}, "no card is called 'a1000x'; the closest are a100"),
        ({"steeps": "3"}, "no setting is called steeps; did you mean steps"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        FitCallback(**settings)  # type: ignore[arg-type]
