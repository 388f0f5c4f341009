"""The tutorial's commands run in its order, and the reference is that of the code."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from project import Project
from test_simulate import needs_cuda_build

FEW = ["--num_trials", "2", "--verify_steps", "0"]
"""What makes the tutorial's search short."""


@pytest.mark.slow
@needs_cuda_build
def test_each_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in commands] == ["simulate", "explain", "search", "best.sh", "check", "check"]
    script = Path("experiments/examples/trainer.py")
    (tmp_path / script.parent).mkdir(parents=True)
    shutil.copy(ROOT / script, tmp_path / script)
    project = Project(tmp_path)
    for line in commands:
        words = shlex.split(line)
        if words[1] == "search":
            words[words.index("--") : words.index("--")] = FEW
        if words[0] == "fitproof":
            words = [sys.executable, "-m", "fitproof", *words[1:]]
            project.environment["PYTHONPATH"] = str(ROOT)
        done = project.call(*words)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if words[-1] == "best.sh":
            assert re.search(r"trainer\.py .*--per_device_train_batch_size \d+", done.stdout)


def test_reference_and_glossary_are_those_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/make_reference.py` writes it anew."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from make_reference import glossary, reference

    assert (ROOT / "docs" / "reference.md").read_text() == reference()
    assert (ROOT / "docs" / "glossary.md").read_text() == glossary()
