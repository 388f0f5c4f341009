"""`check`: training memory against limits and baselines."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from project import Project
from test_simulate import CUDA_PYTHON, needs_cuda_build

from pipeline.cli import main
from pipeline.prediction.commands.memory_baseline import LineMemory, MemoryBaseline, read_baseline, write_baseline
from pipeline.prediction.commands.memory_check import line_changes
from pipeline.tracking.run_of_job import take_run_of_job

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 5120, 1024, 512
model = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH, device="cuda"),
    *[nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, device="cuda") for _ in range(12)],
    nn.Linear(WIDTH, VOCABULARY, bias=False, device="cuda"),
)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1)).cuda()
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COPY = "    kept = logits.clone()\n"
"""A regression that is easily written: an extra copy of the logits."""
COPY_BYTES = 4 * 512 * 5120 * 4
LOSS = "    loss = F.cross_entropy"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project that trains a small language model."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return Project(tmp_path, {"PYTHONPATH": str(ROOT)})


def check(project: Project, words: str = "train.py", **settings: str) -> Any:
    """Check a command of the project on a simulated A100, in this process, which has loaded what a new one has to."""
    return project.here("check", {"gpu": "a100", "command": f"{CUDA_PYTHON} {words}", **settings})


@needs_cuda_build
def test_an_extra_copy_of_the_logits_is_found_by_its_line_and_lines_that_only_moved_are_not(project: Project) -> None:
    accepted = check(project, baseline="memory.json", update="true")
    assert accepted.returncode == 0, accepted.stderr
    script = project.folder / "train.py"
    script.write_text(f"# A comment above all lines.\n\n{SCRIPT}")
    moved = check(project, baseline="memory.json", tolerance="0%", answer="json")
    assert moved.returncode == 0, moved.stderr
    assert json.loads(moved.stdout)["changes"] == []
    script.write_text(SCRIPT.replace(LOSS, COPY + LOSS))
    own = ("--baseline", "memory.json", "--answer", "markdown", "--answer_files", "out/memory.xml,out/memory.json")
    command = ("--", str(CUDA_PYTHON), "train.py")
    grown = project.call("python", "-m", "fitproof", "check", "--gpu", "a100", *own, *command)
    assert grown.returncode == 3, grown.stderr
    found = json.loads((project.folder / "out" / "memory.json").read_text())
    assert found["verdict"] == "too large"
    [change] = found["changes"]
    assert (change["line"], change["code"], change["change_bytes"]) == ("train.py:16", COPY.strip(), COPY_BYTES)
    allocated, reserved = found["requirements"]
    grown_by = allocated["num_bytes"] - allocated["baseline_bytes"]
    assert grown_by == COPY_BYTES and not allocated["is_met"] and not reserved["is_met"]
    assert 1 < 100 * grown_by / allocated["baseline_bytes"] < 2  # a regression of 1 %
    assert f"`{COPY.strip()}`" in grown.stdout and "| allocated |" in grown.stdout
    suite = ElementTree.parse(project.folder / "out" / "memory.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "2", "0")
    assert COPY.strip() in str(suite.findtext("testcase/failure"))
    assert not list(project.folder.glob("mlflow.db*")) and not list(project.folder.glob("runs"))


SMALL = """
import sys
import torch
weight = torch.nn.Parameter(torch.ones(1024, int(sys.argv[1]), device="cuda"))
optimizer = torch.optim.SGD([weight], momentum=0.9)
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
"""


@pytest.mark.matrix(1)
@needs_cuda_build
@pytest.mark.parametrize(
    ("columns", "limit", "code", "said"),
    [
        ("4096", "40MiB", 3, "MiB more than the limit of 40MiB."),
        ("40000000", "40GiB", 3, "Too large for the card."),
        ("many", "1GiB", 1, "Not checked. No verdict: the command ended with exit code 1"),
    ],
    ids=["is larger", "does not fit", "fails"],
)
def test_a_baseline_is_written_only_of_what_passed(
    columns: str, limit: str, code: int, said: str, project: Project
) -> None:
    (project.folder / "small.py").write_text(SMALL)
    done = check(project, f"small.py {columns}", max_allocated=limit, baseline="memory.json", update="true")
    assert (done.returncode, said in " ".join(done.stdout.split())) == (code, True), done.stdout + done.stderr
    assert "memory.json was not written" in done.stdout and not (project.folder / "memory.json").exists()


@needs_cuda_build
def test_a_command_does_not_log_to_the_run_of_the_job(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlflow run` names the job's run in a variable that MLflow in the command would follow."""
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.chdir(project.folder)
    Path("train.py").write_text("import os; open('seen', 'w').write(os.environ.get('MLFLOW_RUN_ID', ''))")
    words = ["--gpu", "a100", "--max_reserved", "1GiB", "--command", f"{CUDA_PYTHON} train.py"]
    assert main(["check", *words]) == 2, "it uses no card"
    assert Path("seen").read_text() == ""
    assert take_run_of_job() == "0" * 32 and "MLFLOW_RUN_ID" not in os.environ


def changed(**changes: Any) -> MemoryBaseline:
    """Return a baseline of an A100, with changes."""
    values = {"card": "NVIDIA A100-SXM4-80GB", "torch": "2.0", "conditions": {}, "lines": ()}
    return MemoryBaseline(**{**values, "peak_allocated_bytes": 1, "peak_reserved_bytes": 2, **changes})


WRONG = {
    "neither limit nor baseline": ([], "with a limit or with a baseline, and neither is given; set --baseline"),
    "update of nothing": (["--max_reserved", "1GiB", "--update"], "none is named; set --baseline memory.json"),
    "no tolerance": (["--baseline", "m.json", "--tolerance", "1"], "tolerance must be a percentage from 0% on"),
    "a negative tolerance": (["--baseline", "m.json", "--tolerance=-1%"], "and is '-1%'; write for example 1%"),
    "no amount": (["--max_reserved", "much"], "max_reserved is a number with a unit"),
    "more than the card": (["--max_reserved", "90GiB"], "max_reserved cannot be more than the device's memory"),
    "no such card": (["--gpu", "a1000", "--max_reserved", "1GiB"], "no card is called 'a1000'"),
    "no format": (["--max_reserved", "1GiB", "--answer_files", "a.pdf"], "ends with .json, .md, .xml"),
    "no baseline": (["--baseline", "absent.json"], "absent.json does not exist; --update writes it"),
    "a folder": (["--baseline", "."], "must be a readable file, and . is not (Is a directory)"),
    "no JSON": (["--baseline", "train.py"], "has written, and train.py is not; name another file"),
    "no file of this kind": (["--baseline", "train.py", "--update"], "and train.py is not; name another file"),
}


@pytest.mark.quick
@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_before_anything_runs(
    words: list[str],
    message: str,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project.folder)
    assert main(["check", "--gpu", "a100", *words, "--", "python", "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in project.folder.iterdir()] == ["train.py"]
    assert (project.folder / "train.py").read_text() == SCRIPT


@needs_cuda_build
@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        (changed(card="Tesla T4"), "of one card, and m.json is of Tesla T4 where this is NVIDIA A100-SXM4-80GB;"),
        (changed(), "of one version of torch, and m.json is of 2.0 where this is 2."),
    ],
    ids=["card", "torch"],
)
def test_a_baseline_of_another_card_or_torch_is_refused(
    baseline: MemoryBaseline,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_baseline(Path("m.json"), baseline)
    assert main(["check", "--gpu", "a100", "--baseline", "m.json", "--", str(CUDA_PYTHON), "train.py"]) == 2
    said = capsys.readouterr().err
    assert message in said and "accept what it needs with this one: --update" in said


LINES = st.lists(
    st.builds(
        LineMemory,
        line=st.builds("{}:{}".format, st.sampled_from(["a.py", "b.py"]), st.integers(1, 5)),
        code=st.sampled_from(["", "x = y", "z = f(x)"]),
        purpose=st.sampled_from(["activations", "gradients"]),
        num_bytes=st.integers(1, 1000),
    ),
    max_size=6,
).map(tuple)


@given(LINES, LINES)
def test_changes_of_lines_add_up_and_none_is_of_a_line_that_moved(
    before: tuple[LineMemory, ...], now: tuple[LineMemory, ...]
) -> None:
    def total(lines: tuple[LineMemory, ...]) -> int:
        return sum(one.num_bytes for one in lines)

    changes = line_changes(before, now)
    assert sum(one.change_bytes for one in changes) == total(now) - total(before)
    assert all(one.change_bytes for one in changes)
    sizes = [abs(one.change_bytes) for one in changes]
    assert sizes == sorted(sizes, reverse=True)
    moved: Callable[[LineMemory], LineMemory] = lambda one: LineMemory(  # noqa: E731
        line=f"{one.line}7" if one.code else one.line, code=one.code, purpose=one.purpose, num_bytes=one.num_bytes
    )
    assert line_changes(before, tuple(map(moved, before))) == ()


@settings(max_examples=30)
@given(lines=LINES)
def test_a_baseline_is_read_as_it_was_written_with_a_row_for_each_line(
    lines: tuple[LineMemory, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("baseline") / "memory.json"
    written = changed(lines=lines, conditions={"attention": "flash"})
    write_baseline(file, written)
    assert read_baseline(file) == written
    assert sum('"num_bytes"' in row for row in file.read_text().splitlines()) == len(lines)
