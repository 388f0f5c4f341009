"""What README and docs say is so: every command runs, every file is listed, every metric is explained."""

import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from conftest import ROOT
from processes import free_port, started, wait_for
from project import SMALL, Project
from test_entry_points import AGAINST_BASELINE, PER_STEP, SUMMARY

from pipeline.config.entry_points import TOOLS

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
WORDS = "the fastest way to train a model in the memory you have "


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a project with some text of its own and with the answer of a search, as the README presumes."""
    project = Project.copy(tmp_path_factory.mktemp("project"))
    (project.folder / "my_text").mkdir()
    (project.folder / "my_text" / "one.txt").write_text(WORDS * 500)
    (project.folder / "best.yaml").write_text("precision: bf16\n")
    return project


def tiny_words(command: str) -> list[str]:
    """Return a command of the README with settings that make it short."""
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "pipeline"] and words[3] in TOOLS:
        return words
    given = {word.partition("=")[0] for word in words}
    small = {**SMALL, **({"budget": "64MiB", "num_trials": "2"} if "search" in words else {})}
    small = {k: v for k, v in small.items() if k not in given}
    if words[0] == "mlflow":
        return words + [word for k, v in small.items() for word in ("-P", f"{k}={v}")]
    return words if "--help" in words else words + [word for k, v in small.items() for word in (f"--{k}", v)]


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--env-manager=local" in c or c.startswith("python")])
def test_a_command_of_the_readme_runs(command: str, project: Project) -> None:
    done = project.call(*tiny_words(command))
    assert done.returncode == 0, done.stderr


def test_make_search_is_the_search_through_mlflow(project: Project) -> None:
    assert "make search" in COMMANDS
    small = {**SMALL, "budget": "64MiB", "num_trials": "2", "study": "make"}
    arguments = " ".join(f"-P {name}={value}" for name, value in small.items())
    done = project.call("make", "-o", ".venv/installed", "search", f"BIN={venv_bin()}", f"ARGS={arguments}")
    assert done.returncode == 0, done.stderr
    assert project.parent_of("search").data.tags["mlflow.project.entryPoint"] == "search"


def test_make_test_is_what_continuous_integration_runs() -> None:
    assert "make test" in COMMANDS
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_make_ui_shows_the_runs_to_this_machine_alone(project: Project) -> None:
    assert "make ui" in COMMANDS
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(project, "make", "-o", ".venv/installed", "ui", f"BIN={venv_bin()}", f"PORT={port}", **quiet):

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1) as answer:
                    return b"<html" in answer.read()
            except OSError:
                return False

        wait_for(answers, "the MLflow UI")
        listening = {c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
        assert listening == {"127.0.0.1"}


def test_the_remaining_commands_are_known() -> None:
    """Of conda's and uv's commands, the first needs conda, the second is the slow test of test_environments.py."""
    run = {c for c in COMMANDS if "--env-manager=local" in c or c.startswith(("python", "make"))}
    assert set(COMMANDS) - run == {"mlflow run . -e accumulation", "mlflow run . -e accumulation --env-manager=uv"}


def test_the_file_tree_is_the_projects_own() -> None:
    listed = set(re.findall(r"^([\w./]+)  +\S", re.search(r"```text\n(.*?)```", README, re.DOTALL)[1], re.MULTILINE))  # type: ignore[index]
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    expected = {
        name
        for name in tracked
        if (ROOT / name).exists() and not re.search(r"__init__\.py$|^\.gitignore$|_\d{4}-\d\d-\d\d\.|\.png$", name)
    }
    assert listed == expected | {"pipeline/__init__.py"}


def test_every_metric_is_explained() -> None:
    explained = set(re.findall(r"`([a-z_]+(?:_\d)?(?:_mib)?)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert explained >= SUMMARY | PER_STEP | AGAINST_BASELINE


def test_every_fault_of_the_reliability_page_has_its_test() -> None:
    rows = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.startswith("| ")][1:]
    named = [re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) >= 11 and all(named)
    for found in filter(None, named):
        assert f"\ndef {found[2]}(" in (ROOT / "tests" / found[1]).read_text(), found[0]


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_to_files_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


def venv_bin() -> Path:
    return Path(sys.executable).parent
