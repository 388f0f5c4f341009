"""A technique in one file outside the package trains, is predicted, searched, reported and exported."""

import csv
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tiny
from project import SMALL, Project
from test_export import losses_of_script

from pipeline.base.errors import InvalidInputError
from pipeline.config.settings import TECHNIQUES

FILE = ROOT / "tests" / "outside" / "recomputed_mlp.py"
SEARCH = {
    **SMALL,
    "num_steps": "6",
    "sequence_length": "8",
    "effective_batch_size": "2",
    "num_trials": "2",
    "verify_steps": "4",
    "timing_warmup_steps": "2",
    "budget": "64MiB",
    "space": '{"micro_batch_size": [2], "precision": ["fp32"], "checkpointing": ["none"], '
    '"recomputed_mlp": [false, true]}',
}
OF_AN_EARLIER_CONTRACT = FILE.read_text().replace(
    "    recomputed_mlp: bool",
    """    layer_period: ClassVar[int] = 2
    own: ClassVar[int] = 2

    def on_host(self, step: Step) -> Step:
        return step

    recomputed_mlp: bool""",
)
IN_PROCESS = """
import json, sys
sys.path[:0] = ["tests"]
import torch
from conftest import tiny
from pipeline.base.results import MemoryUse, StepRecord
from pipeline.export.write import export_files, write_files
from pipeline.memory.device import hardware_of
from pipeline.prediction.predict import predict
from pipeline.training.loop import train
from pathlib import Path

def measured(**changes):
    experiment = tiny(num_steps=4, **changes)
    received = []
    train(experiment, experiment.prepare(), received.append)
    steps = [event for event in received if isinstance(event, StepRecord)]
    peak = next(event.peak_allocated_bytes for event in received if isinstance(event, MemoryUse))
    predicted = predict(experiment, hardware_of(torch.device("cpu"))).peak_allocated_bytes
    return {"losses": [step.loss for step in steps], "peak": peak, "predicted": predicted}

on = tiny(num_steps=4, recomputed_mlp=True)
write_files(export_files(on), Path(sys.argv[1]))
conflict = tiny(recomputed_mlp=True, checkpointing="every_layer").unsupported()
print(json.dumps({"off": measured(), "on": measured(recomputed_mlp=True), "conflict": conflict,
                  "order": [type(technique).__name__ for technique in on.techniques], "params": on.params()}))
"""


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Give what a process with the technique measures and predicts, and the folder of exported files."""
    folder = tmp_path_factory.mktemp("exported")
    environment = {**os.environ, "FITPROOF_TECHNIQUES": "tests.outside.recomputed_mlp"}
    words = [sys.executable, "-c", IN_PROCESS, str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), folder


def test_it_trains_the_same_in_less_memory(in_process: tuple[dict[str, Any], Path]) -> None:
    off, on = in_process[0]["off"], in_process[0]["on"]
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-6)
    assert on["peak"] < 0.9 * off["peak"]


def test_its_peak_is_predicted(in_process: tuple[dict[str, Any], Path]) -> None:
    for one in (in_process[0]["off"], in_process[0]["on"]):
        assert one["predicted"] == pytest.approx(one["peak"], rel=1e-4)


def test_it_is_applied_in_the_order_of_its_stage_and_its_code_is_recorded(
    in_process: tuple[dict[str, Any], Path],
) -> None:
    order = in_process[0]["order"]
    assert order.index("Precision") < order.index("RecomputedMlp") < order.index("OptimizerInBackward")
    assert in_process[0]["params"]["recomputed_mlp"] is True
    assert in_process[0]["params"]["user_code"]


def test_a_combination_that_it_refuses_is_unsupported(in_process: tuple[dict[str, Any], Path]) -> None:
    assert in_process[0]["conflict"] == "recomputed_mlp needs checkpointing=none, and it is every_layer"


def test_the_script_has_it_and_the_other_files_say_that_they_do_not(
    in_process: tuple[dict[str, Any], Path],
) -> None:
    values, folder = in_process
    assert "pipeline" not in (folder / "train.py").read_text()
    losses = losses_of_script(str(folder / "train.py"))
    assert losses == pytest.approx(values["on"]["losses"], abs=1e-5)
    missing = "This is not the training that was measured: it is without recomputed_mlp=True"
    others = ("accelerate_setup.py", "deepspeed_setup.py", "lightning_trainer.py", "trl_sft.py")
    for name in ("accelerate.yaml", "axolotl.yaml", *others):
        assert (folder / name).read_text().startswith(f"# {missing}")
    assert any(missing in note for note in json.loads((folder / "deepspeed.json").read_text())["notes"])
    assert missing not in (folder / "train.py").read_text()
    readme = (folder / "README.md").read_text()
    assert readme.count(missing) == 6


@pytest.mark.slow
def test_a_search_has_it_as_a_dimension(tmp_path: Path) -> None:
    """The command's worker processes are forked from a server, which finds the technique too."""
    project = Project.copy(tmp_path)
    project.environment = {"FITPROOF_TECHNIQUES": "recomputed_mlp"}
    shutil.copy(FILE, tmp_path)
    done = project.pipeline("search", SEARCH)
    assert done.returncode == 0, done.stdout + done.stderr
    parent = project.parent_of("search")
    children = project.children_of(parent).values()
    trials = [child for child in children if "trial" in child.data.tags]
    assert {child.data.params["recomputed_mlp"] for child in trials} == {"False", "True"}
    for child in trials:
        assert child.data.metrics["check/prediction_error_percent"] == pytest.approx(0, abs=0.01)
    [folder] = [file.parent for file in tmp_path.glob("runs/*/handover")]
    assert "recomputed_mlp" in (folder / "best.yaml").read_text()
    assert "recomputed_mlp" in (folder / "report.html").read_text()
    with next(folder.rglob("trials.csv")).open() as file:
        assert {row["recomputed_mlp"] for row in csv.DictReader(file)} == {"False", "True"}


@pytest.fixture
def settings_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Give the function that finds techniques, in a folder with modules of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("pipeline.config.user_techniques")
    for name in ("own_technique", "own_other"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "FITPROOF_TECHNIQUES=own_technique must name a module that can be imported from .*no module own_tech"),
        ("x = 1", "must define one subclass of pipeline.base.technique.Technique, and own_technique defines 0"),
        ("1 / 0", "FITPROOF_TECHNIQUES=own_technique must not raise an error, and raises ZeroDivisionError; fix it"),
        (OF_AN_EARLIER_CONTRACT, "and own_technique has layer_period, on_host of an earlier one, which nothing reads"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(
    text: str | None, message: str, settings_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "own_technique.py").write_text(text)
    monkeypatch.setenv("FITPROOF_TECHNIQUES", "own_technique")
    with pytest.raises(InvalidInputError, match=message):
        settings_module.user_techniques()


def test_a_number_format_that_no_tolerance_is_known_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny()
    assert experiment.unsupported() is None
    monkeypatch.setattr(TECHNIQUES["precision"], "number_format", "fp4")
    assert experiment.unsupported() == (
        "number_format of Precision must be one of fp32, tf32, fp16, bf16 or None, and is 'fp4'"
    )


def test_the_command_line_reports_it_in_one_line(tmp_path: Path) -> None:
    project = Project(tmp_path, {"FITPROOF_TECHNIQUES": "absent", "PYTHONPATH": str(ROOT)})
    done = project.call("python", "-m", "fitproof", "main")
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: FITPROOF_TECHNIQUES=absent must name a module")
