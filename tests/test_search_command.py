"""`search -- command`: a stranger's script, its placeholders as dimensions, its runs timed through the hook."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlflow
import psutil
import pytest
import yaml
from conftest import ROOT, own_cache
from mlflow.entities import Run
from processes import command_line, wait_for
from project import new_store
from test_simulate import CUDA_PYTHON, needs_cuda_build

from fitproof import simulate
from pipeline.base.errors import InvalidInputError
from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.cli import main
from pipeline.config.command import NO_TERMINAL, Command
from pipeline.config.command_template import Template
from pipeline.config.patched_file import read_patched_file
from pipeline.prediction.commands.command import CommandPrediction, conditions, predict_commands, sources_of
from pipeline.report.findings import read_findings
from pipeline.runtime.run import execute
from pipeline.searching.certificate import UNFIT
from pipeline.searching.command_problem import CommandProblem, make_command_problem
from pipeline.searching.proposals import PredictiveProposer
from pipeline.searching.results import SearchFindings
from pipeline.searching.session import session_of
from pipeline.searching.setup import problem_of
from pipeline.searching.trials import Proposal, Trial
from pipeline.simulation.cards import find_card
from pipeline.simulation.torch_build import TorchBuild

SCRIPT = ROOT / "tests" / "commands" / "train.py"
ASKS_FOR_TORCH = """import importlib.util

importlib.util.find_spec("torch")
"""
"""What libraries do that need not have torch."""
BROKEN = "(loss / weight * (float('nan') if given.dtype == 'bf16' and step else 1)).backward()"
"""A backward pass of a loss that is no number in bf16, from the second optimizer step on."""
SHORT = ("--device", "cpu", "--num_trials", "2", "--num_steps", "4", "--verify_steps", "3")
BATCH = ("--batch", "{micro_batch_size}", "--accumulate", "{accumulation_steps}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of its own, with the script and a `sitecustomize` of the user's own on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'own_start')!r}, 'w').close()\n")
    (tmp_path / "train.py").write_text(ASKS_FOR_TORCH + SCRIPT.read_text())
    return tmp_path


def search(*words: str, budget: str = "100MiB", own: Sequence[str] = ()) -> int:
    """Search the words behind Python, with settings of the test's own."""
    settings = ("--effective_batch_size", "8", "--budget", budget, *SHORT, *own)
    return main(["search", *settings, "--", sys.executable, *words])


def found(folder: Path) -> SearchFindings:
    """Return what the last search found."""
    findings = read_findings(sorted(folder.glob("runs/*-search-*"), key=lambda path: path.stat().st_mtime)[-1])
    assert isinstance(findings, SearchFindings)
    return findings


def runs(folder: Path) -> list[Run]:
    """Return all runs in MLflow, the parents first."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    logged = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return sorted(logged, key=lambda run: run.info.start_time)


def test_a_script_is_searched_verified_and_handed_back_as_a_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("train.py", *BATCH, "--steps", "20")
    assert search(*words) == 0
    findings, printed = found(folder), capsys.readouterr().out
    best, verification = findings.best, findings.verification
    assert best is not None and verification is not None and verification.plain is not None
    size = int(best.choice["micro_batch_size"])
    line = printed.rstrip().splitlines()[-1].strip()
    assert shlex.split(line)[1:] == ["train.py", "--batch", str(size), "--accumulate", str(8 // size), "--steps", "20"]
    assert findings.command == line and (folder / "best.sh").read_text().strip() == line
    assert verification.same_training and len(verification.losses) == len(verification.plain_losses) == 3
    assert verification.max_loss_difference is not None and verification.max_loss_difference < 1e-5
    assert findings.unit == "samples/s" and "samples/s" in printed and "tokens" not in printed
    by_size = {row.choice["micro_batch_size"]: row.peak_bytes or 0 for row in findings.rows}
    assert by_size[max(by_size)] > by_size[min(by_size)] > 2**20
    assert (folder / "own_start").exists() and not (folder / "model.pt").exists()
    [parent, *children] = runs(folder)
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert all(
        run.data.params["command"].split()[1:4] == ["train.py", "--batch", one]
        for run, one in ((run, run.data.params["micro_batch_size"]) for run in children)
    )
    assert all("speed/samples_per_second" in run.data.metrics for run in children if run.data.tags["outcome"] == "ok")
    page = (sorted(folder.glob("runs/*"))[-1] / "report.html").read_text()
    assert "samples per second" in page and "tokens per second" not in page
    num_trials = len(findings.rows)

    assert search(*words, own=("--verify_steps", "0")) == 0  # resumed: nothing is measured again
    assert len(found(folder).rows) == num_trials


def test_a_value_that_fails_in_the_first_run_does_not_end_the_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = PredictiveProposer.next

    def failing_first(
        proposer: PredictiveProposer, rows: Sequence[Trial], extra: Sequence[Trial] = ()
    ) -> Proposal | None:
        return propose(proposer, rows, extra) if rows else Proposal({"micro_batch_size": 4, "dtype": "fp33"})

    monkeypatch.setattr(PredictiveProposer, "next", failing_first)
    own = ("--num_trials", "3", "--verify_steps", "0")
    assert search("train.py", *BATCH, "--dtype", "{dtype:fp32,fp33}", own=own) == 0
    first, second, *_ = sorted(found(folder).rows, key=lambda row: row.number)
    assert first.outcome == "crashed" and second.outcome == "ok"
    assert second.choice == {"micro_batch_size": 4, "dtype": "fp32"}


@pytest.mark.slow
def test_a_training_whose_loss_is_no_number_is_no_answer(folder: Path) -> None:
    script = (folder / "train.py").read_text()
    (folder / "train.py").write_text(script.replace("(loss / weight).backward()", BROKEN))
    own = ("--num_trials", "3", "--verify_steps", "0")
    assert search("train.py", *BATCH, "--dtype", "{dtype:fp32,bf16}", own=own) == 0
    findings = found(folder)
    assert findings.best is not None and findings.best.choice["dtype"] == "fp32"
    outcomes = {row.choice["dtype"]: (row.outcome, row.detail) for row in findings.rows}
    assert outcomes["bf16"] == ("diverged", "the loss of optimizer step 1 is not finite")


def test_passes_that_do_not_follow_the_micro_batch_end_the_search(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search("train.py", "--batch", "{micro_batch_size:1,2}", "--accumulate", "8") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"this run made [12] for each micro-batch of its size where an earlier one made [12]", said)


@pytest.mark.slow
def test_a_training_that_does_not_repeat_itself_is_not_said_to_be_another(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.read_text().replace("torch.manual_seed(0)", ""))
    assert search("train.py", *BATCH) == 0
    verification = found(folder).verification
    assert verification is not None and verification.max_loss_difference is not None
    assert verification.max_loss_difference > verification.tolerance and verification.same_training is None
    assert "this training does not repeat itself" in verification.summary and len(verification.runs) == 3


@pytest.mark.slow
def test_a_mean_of_means_is_seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("train.py", *BATCH, "--mean_of_means") == 0
    verification = found(folder).verification
    assert verification is not None and verification.same_training is False
    assert "accumulation is not the same training here" in verification.difference
    assert verification.difference in " ".join(capsys.readouterr().out.split())


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", *BATCH, "--dtype", "{dtype:fp33,fp34}"], "invalid choice: 'fp33'"),
        (
            ["train.py", "--batch", "{micro_batch_size}"],
            "takes 8 backward passes in an optimizer step, and",
        ),
        (["train.py", *BATCH, "--steps", "1"], "ended by itself after 1 optimizer steps, and 3 are needed"),
        (["-c", "print(1)", "{--flag}"], "without an optimizer step"),
        (["-c", "import sys\nwhile sys.stdin.readline() != 'y': pass", "{--flag}"], NO_TERMINAL),
    ],
    ids=["refused by the script", "another effective batch", "ends early", "no optimizer", "asks until it is answered"],
)
def test_a_command_that_cannot_be_measured_is_refused_once_in_its_own_words(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert search(*words) == 2
    printed = capsys.readouterr()
    assert printed.err.count(message) == 1 and message not in printed.out


OTHER_OUTPUTS = """
import torch
from torch.autograd.graph import get_gradient_edge

layer = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(4):
    loss = layer(torch.ones(1, 4)).sum()
    torch.autograd.backward(OUTPUTS)
    assert layer.weight.grad is not None
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("outputs", ["(one for one in [loss])", "get_gradient_edge(loss)", "[get_gradient_edge(loss)]"])
def test_a_backward_pass_of_other_than_tensors_is_left_as_it_is(folder: Path, outputs: str) -> None:
    (folder / "other.py").write_text(OTHER_OUTPUTS.replace("OUTPUTS", outputs))
    made = problem(f"{sys.executable} other.py {{--flag}}", num_steps=4)
    result = execute(made.runnable(made.space.choices[0]), folder / "log.txt")
    assert result.outcome is Outcome.OK and len(result.steps) == 4, (folder / "log.txt").read_text()


def test_losses_of_any_collection_are_those_of_the_step(folder: Path) -> None:
    (folder / "other.py").write_text(OTHER_OUTPUTS.replace("OUTPUTS", '{"a": loss, "b": 2 * loss}.values()'))
    made = problem(f"{sys.executable} other.py {{--flag}}", num_steps=4)
    result = execute(made.runnable(made.space.choices[0]), folder / "log.txt")
    assert result.outcome is Outcome.OK and len(result.steps) == 4, (folder / "log.txt").read_text()
    assert all(math.isfinite(step.loss) for step in result.steps)  # NaN where none was seen


JSON = '{"dtype": "fp32", "train": {"micro_batch_size": 8, "gradient_accumulation_steps": 1}}'
YAML = "# mine\ndtype: fp32\ntrain:\n  micro_batch_size: 8\n  gradient_accumulation_steps: 1\n"
TOML = 'dtype = "fp32"\n[train]  # mine\nmicro_batch_size = 8\ngradient_accumulation_steps = 1\n'


def test_keys_of_a_file_are_dimensions_and_the_file_stays_as_it_is(folder: Path) -> None:
    (folder / "run.json").write_text(JSON)
    patch = ("--patch", "run.json dtype=bf16", "--verify_steps", "0")
    assert search("train.py", "--config", "run.json", own=patch) == 0
    best = found(folder).best
    assert best is not None and best.choice["dtype"] == "bf16"
    size = best.choice["micro_batch_size"]
    written = json.loads((folder / "best-run.json").read_text())
    assert written == {"dtype": "bf16", "train": {"micro_batch_size": size, "gradient_accumulation_steps": 8 // size}}
    assert found(folder).command.endswith("train.py --config best-run.json")
    assert (folder / "run.json").read_text() == JSON
    assert all("bf16" in row.choice.values() for row in found(folder).rows)


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML), ("run.json", JSON)])
def test_a_patched_file_has_the_values_in_their_types(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    command = f"python train.py --config={name} {{{name}}}"
    made = problem(command, patch=f"{name} dtype=fp32,bf16", env="OMP_NUM_THREADS=,1")
    assert [*made.space.dimensions] == ["micro_batch_size", "dtype", "OMP_NUM_THREADS"]
    one = made.runnable({"micro_batch_size": 2, "dtype": "bf16", "OMP_NUM_THREADS": "1"})
    copy = read_patched_file(str(write(folder / f"copy-{name}", one.files[name])))
    train = {"train.micro_batch_size": 2, "train.gradient_accumulation_steps": 4}
    assert copy.values == {"dtype": "bf16", **train} and ("# mine" in copy.text) == (name == "run.toml")
    assert one.with_names("best-")[-2:] == (f"--config=best-{name}", f"best-{name}")
    assert one.environment == {"OMP_NUM_THREADS": "1"} and one.line.startswith("OMP_NUM_THREADS=1 python ")
    rate = problem(command, patch=f"{name} dtype=5e8,2e-4").runnable({"micro_batch_size": 2, "dtype": "5e8"})
    assert read_patched_file(str(write(folder / f"copy-{name}", rate.files[name]))).values["dtype"] == 5e8
    twice = problem(command, patch=f"{name} dtype=fp32,bf16 {name} train.micro_batch_size={{micro_batch_size:1,2}}")
    assert {*twice.space.dimensions} == {"micro_batch_size", "dtype"}
    for patch, message in (
        (f"{name} dtyp=1", "has no dtyp; close are dtype"),
        (f"{name} dtype", "write dtype=value,value"),
        ("none.yaml a=1", "none.yaml must be"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            problem(command, patch=patch)
    with pytest.raises(InvalidInputError, match="one that the command reads"):
        problem("python train.py", patch=f"{name} dtype=fp32,bf16")


@pytest.mark.parametrize(
    ("name", "text", "key", "expected"),
    [
        (
            "a.toml",
            "[train]\nsteps = 10\n[[data]]\nsteps = 5\n",
            "train.steps",
            "[train]\nsteps = 7\n[[data]]\nsteps = 5\n",
        ),
        ("a.yaml", "a: &x\n  lr: 1\nb: *x\n", "a.lr", "a:\n  lr: 7\nb:\n  lr: 1\n"),
        ("a.toml", "steps = 1\nlow = nan\n", "steps", "steps = 7\nlow = nan\n"),
        ("a.yaml", "optimizer.lr: 1\n8:\n  steps: 2\n", "optimizer.lr", "optimizer.lr: 7\n8:\n  steps: 2\n"),
        ("a.yaml", "optimizer.lr: 1\n8:\n  steps: 2\n", "8.steps", "optimizer.lr: 1\n8:\n  steps: 7\n"),
    ],
)
def test_a_patch_changes_the_key_that_it_names_alone(
    folder: Path, name: str, text: str, key: str, expected: str
) -> None:
    assert read_patched_file(str(write(folder / name, text))).with_values({key: 7}) == expected


def test_a_worker_makes_the_same_problem_of_a_command(folder: Path) -> None:
    made = problem(f"python {SCRIPT} --batch {{micro_batch_size}}", num_steps=5)
    joined = problem_of(session_of(made, "shared", None, "http://127.0.0.1:9").settings)
    assert joined.identity == made.identity and joined.budget_bytes == made.budget_bytes


def test_a_patch_that_would_change_text_is_refused(folder: Path) -> None:
    file = read_patched_file(str(write(folder / "a.toml", 'steps = 1\nabout = """\nsteps = 5\n"""\n')))
    with pytest.raises(InvalidInputError, match="must stand in one line behind it"):
        file.with_values({"steps": 7})


TRAINER = """
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        tokens = torch.randint(512, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


[arguments] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
config = GPT2Config(vocab_size=512, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens()).train()
"""


@pytest.mark.slow
def test_a_trainer_script_needs_no_placeholder_and_trains_the_same(folder: Path) -> None:
    (folder / "trainer.py").write_text(TRAINER)
    words = ("--output_dir", "out", "--max_steps", "50", "--report_to", "none", "--use_cpu", "true")
    space = (
        "--space",
        json.dumps({"micro_batch_size": [2, 8], "gradient_checkpointing": ["false"], "bf16": ["false"]}),
    )
    assert search("trainer.py", *words, own=space) == 0
    findings = found(folder)
    best, verification = findings.best, findings.verification
    assert best is not None and verification is not None and verification.same_training
    size = best.choice["micro_batch_size"]
    assert f"--per_device_train_batch_size {size} --gradient_accumulation_steps {8 // size}" in findings.command
    assert not list(folder.glob("out/checkpoint-*"))


def test_known_commands_have_their_levers_and_obey_what_these_change(folder: Path) -> None:
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "sft.yaml").write_text("micro_batch_size: 8\ngradient_accumulation_steps: 1\noptimizer: adamw_torch\n")
    script = problem("python trainer.py --per_device_train_batch_size 8 --bf16 true")
    assert [*script.space.dimensions] == ["micro_batch_size", "gradient_checkpointing"]  # bf16 is given
    line = script.runnable({"micro_batch_size": 2, "gradient_checkpointing": "true"}).line
    options = (
        "--per_device_train_batch_size 2 --bf16 true --gradient_accumulation_steps 4 --gradient_checkpointing true"
    )
    assert line == f"python trainer.py {options}"
    trl = problem("trl sft --config sft.yaml --bf16=true")
    assert trl.baselines[0] == {"micro_batch_size": 8, "gradient_checkpointing": "true"}
    optimizers = {"optim": ["adamw_torch_fused", "adafactor"]}
    exact = problem("trl sft --bf16 true", space=optimizers)
    assert exact.space.dimensions["optim"] == ("adamw_torch_fused",) and "is different" in " ".join(exact.notes)
    different = problem("trl sft --bf16 true", space=optimizers, mathematics="different")
    adafactor = {"micro_batch_size": 4, "gradient_checkpointing": "false", "optim": "adafactor"}
    assert different.baseline_beside(adafactor)[0] == {
        "micro_batch_size": 8,
        "gradient_checkpointing": "true",
        "optim": "adafactor",
    }
    titan = problem("torchrun --nproc_per_node 2 -m torchtitan.train --training.local_batch_size=8")
    line = titan.runnable({"micro_batch_size": 2}).line
    assert line.endswith("-m torchtitan.train --training.local_batch_size=2 --training.global_batch_size 8")
    (folder / "c.yaml").write_text("trainer: {precision: bf16-mixed}")
    (folder / "main.py").write_text("LightningCLI()")
    assert [*problem("python main.py fit -c c.yaml").space.dimensions] == ["micro_batch_size"]  # the file has precision
    for line in ("axolotl train sft.yaml", "axolotl train --debug --deepspeed=ds.json --deepspeed ds.json sft.yaml"):
        axolotl = problem(line)
        assert "gradient_accumulation_steps: 4" in axolotl.runnable({"micro_batch_size": 2}).files["sft.yaml"]


LIGHTNING = """
import lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        layers = [torch.nn.Linear(32, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)]
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch, index):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Rows(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        noise = torch.Generator().manual_seed(0)
        rows = torch.randn(512, 32, generator=noise), torch.randint(8, (512,), generator=noise)
        return DataLoader(TensorDataset(*rows), batch_size=self.batch_size)


LightningCLI(Net, Rows, seed_everything_default=0)
"""
SETTINGS = """
trainer: {max_epochs: 4, accelerator: cpu, enable_progress_bar: false}
model: {width: 256}
data: {batch_size: 4}
"""


@pytest.mark.slow
def test_a_lightning_cli_needs_no_placeholder_and_its_answer_trains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    (folder / "main.py").write_text(LIGHTNING)
    (folder / "c.yaml").write_text(SETTINGS)
    assert [*problem("python main.py fit --config c.yaml").space.dimensions] == [
        "micro_batch_size",
        "trainer.precision",
    ]
    space = ("--space", json.dumps({"micro_batch_size": [2, 8], "trainer.precision": ["32-true"]}))
    words = ("main.py", "fit", "--config", "c.yaml", "--data.batch_size=4")
    assert search(*words, own=space) == 0
    findings = found(folder)
    best, verification = findings.best, findings.verification
    assert best is not None and verification is not None and verification.same_training
    assert {row.outcome for row in findings.rows} == {"ok"} and len(findings.rows) == 2
    size = int(best.choice["micro_batch_size"])
    others = f"--trainer.accumulate_grad_batches {8 // size} --trainer.precision 32-true"
    assert findings.command.endswith(f"main.py fit --config c.yaml --data.batch_size={size} {others}")
    assert not list(folder.glob("lightning_logs/*/checkpoints"))
    done = subprocess.run([*shlex.split(findings.command), "--trainer.max_steps=2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def write(file: Path, text: str) -> Path:
    """Write a file and return its path."""
    file.write_text(text)
    return file


@pytest.mark.slow
@needs_cuda_build
def test_a_card_decides_what_fits_and_this_machine_what_is_fast(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(own_cache(folder / "cache")))
    words = ("train.py", "--batch", "{micro_batch_size:1,8}", "--accumulate", "{accumulation_steps}")
    assert search(*words, budget="24MiB", own=("--gpu", "t4", "--verify_steps", "0")) == 0
    [row], printed = found(folder).rows, capsys.readouterr().out
    [too_large] = found(folder).certificate.unmeasured  # type: ignore[union-attr]
    assert row.choice == {"micro_batch_size": 1} and row.tokens_per_second
    assert too_large.reason == UNFIT and (too_large.predicted_peak_bytes or 0) > 24 * MIB >= (row.peak_bytes or 0)
    command = [str(CUDA_PYTHON), "train.py", "--batch", "1", "--accumulate", "8"]
    simulated = simulate(command=command, gpu="t4", smallest=False).largest
    assert simulated is not None and row.peak_bytes == simulated.peak_reserved_bytes
    made = problem(shlex.join([sys.executable, *words]), gpu="t4")
    one, eight = made.predicted(made.unpredicted(made.space.choices))  # cached, as the search has simulated both
    assert 0 < 8 * one.pass_work.flops == eight.pass_work.flops and one.update_work == eight.update_work
    assert row.metrics["peak_cpu_allocated_mib"] > 0 and "memory is that of a simulated Tesla T4" in printed


@pytest.mark.slow
@needs_cuda_build
def test_a_script_that_asks_on_a_card_ends_with_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "asks.py").write_text("import torch\nopen('/dev/tty').read()\n")  # as getpass does
    assert search("asks.py", *BATCH, own=("--gpu", "t4")) == 2
    assert NO_TERMINAL in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a command follows --, and there is none"),
        (["no-such-program", "{micro_batch_size}"], "no-such-program cannot be started (No such file or directory)"),
    ],
)
def test_a_command_that_is_none_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["search", "--effective_batch_size", "8", "--budget", "1GiB", *SHORT, "--", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def key_of(command: str, **own: str) -> str:
    """Return what the cached prediction of a command depends on."""
    made = problem(f"{command} --batch {{micro_batch_size:1}}", **own)
    commands = [made.runnable(choice) for choice in made.space.choices]
    build = TorchBuild(Path("torch"), "2.13.0", "12.8")
    return conditions(commands[0], build, find_card("t4"), sources_of(commands))


@pytest.mark.parametrize(
    ("command", "edited"),
    [
        ("python -m package.train", "package/train.py"),
        ("python -m package.train", "package/models/net.py"),
        ("bash train.sh", "train.py"),
        ("python train.py --config=../settings.yaml", "../settings.yaml"),
        ("python ../beside/train.py", "../beside/net.py"),
        ("python train.py", "conf/model/large.yaml"),
    ],
)
def test_a_cached_prediction_is_of_the_files_that_a_command_reads(
    folder: Path, command: str, edited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "project").mkdir()
    monkeypatch.chdir(folder / "project")
    monkeypatch.setenv("FITPROOF_CACHE", str(folder / "project" / "cache"))
    for name in ("../beside/train.py", "train.py", "train.sh", "runs/a/best.yaml", edited):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    before = key_of(command)
    for written in (
        "best.yaml",
        "best-settings.yaml",
        "mlflow.db",
        "runs/a/findings.json",
        "cache/a.json",
    ):  # by a search
        Path(written).write_text("{}")
    assert key_of(command) == before
    Path(edited).write_text("other: 1")
    assert key_of(command) != before


def test_a_cached_prediction_is_of_the_variables_and_the_time_that_a_command_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key_of("python train.py")
    monkeypatch.setenv("SSH_CLIENT", "192.0.2.1 5000 22")
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "0")
    assert key_of("python train.py") == before
    assert key_of("python train.py", time_limit="60") != before
    monkeypatch.setenv("MODEL_SIZE", "7")
    assert key_of("python train.py") != before


@needs_cuda_build
def test_ctrl_c_ends_a_run_on_a_card_that_has_no_terminal(folder: Path) -> None:
    (folder / "waits.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    made = problem(f"{CUDA_PYTHON} waits.py {{--x}}")
    commands = [made.runnable(choice) for choice in made.space.choices]

    def press_ctrl_c() -> None:
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_ctrl_c).start()
    with pytest.raises(KeyboardInterrupt):
        predict_commands(commands, find_card("t4"), may_install=False)
    assert not psutil.pid_exists(int((folder / "pid").read_text()))


@needs_cuda_build
def test_a_command_that_cannot_be_simulated_is_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "fails.py").write_text("raise ValueError('not on a card')\n")
    made = problem(f"{CUDA_PYTHON} fails.py {{--x}}", gpu="t4")
    [first, *_] = made.predicted(made.unpredicted(made.space.choices[:1]))
    assert first.not_predicted == "on the simulated card it ended with exit code 1"
    monkeypatch.setattr("pipeline.searching.command_problem.predict_commands", None)  # it is not called any more
    assert made.predicted([first])[0].not_predicted == first.not_predicted


COMPILED = """
import sys
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

linear = nn.Linear(256, 768, dtype=torch.bfloat16, device="cuda")

def layer(x):
    query, key, value = linear(x).view(4, 512, 3, 4, 64).permute(2, 0, 3, 1, 4)
    return gelu(scaled_dot_product_attention(query, key, value, is_causal=True)).transpose(1, 2).reshape(4, 512, 256)

def loss(x):
    return checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False).sum()

if "--compile" in sys.argv:
    loss = torch.compile(loss)
optimizer = torch.optim.SGD(linear.parameters())
for _ in range(5):
    loss(torch.ones(4, 512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@needs_cuda_build
def test_the_work_of_a_compiled_command_is_that_of_its_kernels(folder: Path) -> None:
    (folder / "compiled.py").write_text(COMPILED)
    made = problem(f"{CUDA_PYTHON} compiled.py {{--compile}}")
    commands = [made.runnable(choice) for choice in made.space.choices]
    outcomes = predict_commands(commands, find_card("a100"), may_install=False)
    eager, compiled = (cast(CommandPrediction, outcome).passes_work for outcome in outcomes)
    assert eager is not None and compiled is not None
    assert compiled.matrix_flops == eager.matrix_flops, "torch.compile runs attention with a state of random numbers"
    assert 0.2 < compiled.moved_bytes / eager.moved_bytes < 0.8, "fused kernels read and write less"
    assert compiled.num_kernels < eager.num_kernels


SPAWNED = """
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(optimizer.step, backend="eager")
    for _ in range(9):
        model(torch.ones(4, 8)).sum().backward()
        update()
        optimizer.zero_grad()


if __name__ == "__main__":
    mp.spawn(train, args=(os.path.abspath("met"),), nprocs=2)
"""


@pytest.mark.slow
def test_ranks_are_those_of_the_process_group_where_no_launcher_says_them(folder: Path) -> None:
    """They compile their update, which is followed all the same."""
    (folder / "spawned.py").write_text(SPAWNED)
    made = problem(f"{sys.executable} spawned.py {{--x}}", world_size=2, num_steps=3, time_limit=100)
    result = execute(made.runnable({"x": False}), folder / "log")
    assert (result.outcome, len(result.steps)) == ("ok", 3), result.detail


def test_a_killed_run_leaves_no_process_and_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    (folder / "it.yaml").write_text("x: 1\n")
    made = problem("bash -c 'sleep 4747 & exec sleep 4747' it.yaml", patch="it.yaml x=1,2", time_limit=2)
    result = execute(made.runnable({"x": 1}), folder / "log")
    assert result.outcome == "timed_out"
    wait_for(lambda: "4747" not in " ".join(map(command_line, psutil.process_iter())), "the end of the command")
    left = problem("bash -c 'sleep 4748 & exit 3' it.yaml", patch="it.yaml x=1,2")
    assert execute(left.runnable({"x": 1}), folder / "log").outcome == "crashed"
    assert "4748" not in " ".join(map(command_line, psutil.process_iter()))
    assert not list((folder / "tmp").rglob("it.yaml"))


def problem(command: str, **others: Any) -> CommandProblem:
    """Return the problem of a command."""
    given = {"effective_batch_size": 8, "budget": "1GiB", "device": "cpu", **others}
    return make_command_problem({"command": command, **given})


@pytest.mark.parametrize(
    ("command", "others", "message"),
    [
        ("python train.py --batch 4", {}, "this has none"),
        ("python train.py --dtype dtype:fp32 bf16", {}, "put quotes around it"),
        ("python train.py --dtype {dtype}", {}, "the placeholder {dtype} needs values"),
        ("python train.py --batch {micro_batch}", {}, "did you mean {micro_batch_size}?"),
        (
            "python train.py {--compile}",
            {"space": {"compiled": [True]}},
            "{compiled} is none of them; they are",
        ),
        ("python train.py --n {accumulation_steps} {--x}", {}, "follows from {micro_batch_size}, which is missing"),
        ("python train.py --b={--x}", {}, "a flag that is there or not is a word of its own"),
        ("python train.py --b {micro_batch_size:1,two}", {}, "whole numbers from 1 on, and has 'two'"),
        ("python train.py {--x}", {"budget": "auto"}, "on a CPU needs a budget"),
        ("python train.py {--x}", {"model": "gpt2"}, "no setting is called model"),
        (
            "torchrun --nproc-per-node 16 train.py --b {micro_batch_size}",
            {},
            "does not divide the effective batch",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(
    command: str, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        problem(command, **others)
    assert message in str(refused.value)


def test_placeholders_become_words() -> None:
    made = problem(
        "torchrun --nproc_per_node=2 train.py --b={micro_batch_size} --n {accumulation_steps} "
        "--all {effective_batch_size} {--compile} '{optimizer:--optim adamw,}' '{\"json\": 1}'"
    )
    lines = [shlex.split(made.runnable(choice).line)[2:] for choice in made.space.choices]
    assert len(lines) == 3 * 2 * 2  # 8 sequences are at most 4 in each of two processes
    json_word = json.dumps({"json": 1})
    assert ["train.py", "--b=4", "--n", "1", "--all", "8", json_word] in lines
    assert ["train.py", "--b=1", "--n", "4", "--all", "8", "--compile", "--optim", "adamw", json_word] in lines
    assert made.baselines[0] == {"micro_batch_size": 4, "compile": False, "optimizer": "--optim adamw"}
    assert Template(("accelerate", "--num_processes", "4", "--nnodes=2")).num_processes == 8


def test_patched_files_of_one_name_are_both_read(folder: Path) -> None:
    for number, name in enumerate("ab"):
        (folder / name).mkdir()
        (folder / name / "c.yaml").write_text(f"of: {name}\nx: 1\ny: {number}\n")
    made = problem("python train.py --data a/c.yaml --train b/c.yaml", patch="a/c.yaml x=1,2 b/c.yaml y=3,4")
    copies = folder / "copies"
    copies.mkdir()
    runnable = made.runnable(made.space.choices[0])
    assert isinstance(runnable, Command)
    _, _, _, data, _, train = runnable.with_copies(copies)
    assert [yaml.safe_load(Path(file).read_text())["of"] for file in (data, train)] == ["a", "b"]


def test_a_script_that_has_changed_is_another_study(folder: Path) -> None:
    before = problem("python train.py {--x}").identity
    assert problem("python train.py {--x}").identity == before
    (folder / "train.py").write_text("# changed")
    assert problem("python train.py {--x}").identity != before
