"""What the project says of itself: requirements, entry points and their parameters, the file tree."""

import re
import shlex
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from levers import LEVERS
from project import SMALL, Project

from pipeline.base.settings import Settings
from pipeline.cli import parse, settings_of
from pipeline.config.entry_points import FOLDER, SINGLE, TOOLS, entry_points
from pipeline.config.given import dotted
from pipeline.config.settings import TECHNIQUES
from pipeline.config.variants import read_yaml

MLPROJECT = yaml.safe_load((ROOT / "MLproject").read_text())
OTHER_TRAININGS = {lever.technique for lever in LEVERS} - {lever.technique for lever in LEVERS if lever.same_training}
OF_SEVERAL_PROCESSES = ("sharding", "tensor_parallel")
"""Techniques whose baseline is a training in several processes."""


def test_conda_and_pip_install_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "conda.yaml").read_text())
    [pip] = [item["pip"] for item in conda["dependencies"] if isinstance(item, dict)]
    assert sorted(pip) == sorted(project["dependencies"])
    [python] = [item for item in conda["dependencies"] if str(item).startswith("python")]
    assert python.removeprefix("python=") == project["requires-python"].removeprefix(">=")


def test_project_and_distribution_have_the_same_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == MLPROJECT["name"] == "fitproof"


def test_mlproject_declares_every_entry_point() -> None:
    assert sorted(MLPROJECT["entry_points"]) == sorted([*entry_points(), *TOOLS])


@pytest.mark.parametrize(
    "technique", [name for name in TECHNIQUES if name not in (*OTHER_TRAININGS, *OF_SEVERAL_PROCESSES)]
)
def test_the_levers_have_every_technique_that_keeps_the_training(technique: str) -> None:
    variants = read_yaml(FOLDER / "levers.yaml")["comparisons"]["alone"]["variants"].values()
    assert any(set(variant) & set(TECHNIQUES[technique].model_fields) for variant in variants)


@pytest.mark.parametrize("entry", MLPROJECT["entry_points"])
def test_mlproject_declares_only_what_an_entry_point_cannot_do_without(entry: str) -> None:
    """MLflow passes undeclared parameters on as --name value; a declared default would be passed on as if given."""
    spec = MLPROJECT["entry_points"][entry]
    names = list(spec.get("parameters", {}))
    required = [name for name, field in settings_of(entry).model_fields.items() if field.is_required()]
    assert names == required
    assert all(kind == "string" for kind in spec.get("parameters", {}).values())
    words = shlex.split(spec["command"].format(**{name: f"value-of-{name}" for name in names}))
    assert words[:4] == ["python", "-m", "fitproof", entry]
    assert dict(dotted(parse(entry, words[4:]))) == {name: f"value-of-{name}" for name in names}


def test_every_folder_of_the_package_is_installed() -> None:
    """setup.py finds folders by their __init__.py."""
    folders = {file.parent for file in (ROOT / "pipeline").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the package as `pip install .` builds it, here with the build tools of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = Project.copy(folder / "source", with_store=False)
    built = source.call(*f"python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir {folder} .".split())
    assert built.returncode == 0, built.stderr
    [file] = folder.glob("*.whl")
    return file


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Beside code: the page, templates, cards, C sources, questions and the entry points' YAML."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [scripts] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("entry_points.txt")]
    listing = "git ls-files --cached --others --exclude-standard fitproof pipeline experiments pytest_fitproof.py"
    listed = subprocess.run(listing.split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    of_checkout = ("experiments/examples/", "pipeline/simulation/README.md")
    kept = [name for name in listed if not name.startswith(of_checkout) and (ROOT / name).exists()]
    assert names == {f"pipeline/{name}" if name.startswith("experiments/") else name for name in kept}
    assert "fitproof = fitproof.__main__:run" in scripts and "[pytest11]\nfitproof = pytest_fitproof" in scripts


@pytest.mark.slow
def test_an_installed_package_runs_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """The packages that it needs are those of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "elsewhere").mkdir()
    project = Project(tmp_path / "elsewhere", {"PYTHONPATH": str(tmp_path / "installed")})
    plan = {**SMALL, "gpu": "t4", "effective_batch_size": "2", "space": '{"micro_batch_size": [1, 2]}'}
    for entry, settings in {"main": SMALL, "plan": plan}.items():
        done = project.pipeline(entry, settings)
        assert done.returncode == 0, done.stderr
        assert len(list(project.folder.glob(f"runs/*-{entry}-*/report.html"))) == 1


@pytest.mark.parametrize("entry", entry_points())
def test_yaml_says_only_what_differs(entry: str) -> None:
    structure = ("question", "comparisons", "sections", "space", "space_of_lengths", "kinds", "compared")
    for file in [FOLDER / f"{entry}.yaml"] if entry not in SINGLE else (FOLDER / "single").glob("*.yaml"):
        values = {k: v for k, v in read_yaml(file).items() if k not in structure}
        defaults = dict(dotted({k: plain(f.default) for k, f in settings_of(entry).model_fields.items()}))
        same = {k for k, v in values.items() if defaults[k] == v} - ({"precision"} if file.stem == "fp32" else set())
        assert not same, f"{file} repeats the defaults of {same}"


def plain(default: Any) -> Any:
    return default.model_dump() if isinstance(default, Settings) else default


@pytest.mark.parametrize(
    "forbidden",
    [
        r"/root/|/work/|/opt/|index-url|pypi\.org|Claude|Anthropic",
        r"\binstall[\s\"']{1,40}(?-i:fitproof|headroom)\b",  # there is no release, and a stranger has the former name
    ],
    ids=["a machine or a registry", "the project as a package of an index"],
)
def test_no_file_names(forbidden: str) -> None:
    pattern = re.compile(forbidden, re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (n for n in listed if n != "tests/test_project.py" and (ROOT / n).exists()):
        assert not pattern.search((ROOT / name).read_text(errors="ignore")), name
