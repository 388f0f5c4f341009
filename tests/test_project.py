"""What the project says of itself: requirements, entry points and their parameters, the file tree."""

import re
import shlex
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from conftest import ROOT

from pipeline.base.contracts import Settings
from pipeline.cli import OWN_SETTINGS, parse, settings_of
from pipeline.config.entry_points import FOLDER, SINGLE, entry_points
from pipeline.config.settings import TECHNIQUES, dotted, merged, nested
from pipeline.config.variants import read_yaml

MLPROJECT = yaml.safe_load((ROOT / "MLproject").read_text())
DECLARED = [
    (entry, name, spec)
    for entry, spec_ in MLPROJECT["entry_points"].items()
    for name, spec in spec_["parameters"].items()
]
TYPES = {"int": int, "float": float, "string": str}


def code_default(entry: str, name: str) -> Any:
    """Return the value that an entry point would use without MLproject: its YAML's, or else the code's."""
    kind = settings_of(entry)
    file = FOLDER / f"{entry}.yaml"
    of_file = nested(read_yaml(file)) if file.exists() else {}
    defaults = {key: field.default for key, field in kind.model_fields.items()}
    return dict(dotted(merged(defaults, of_file)))[name]


def test_conda_and_pip_install_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "conda.yaml").read_text())
    [pip] = [item["pip"] for item in conda["dependencies"] if isinstance(item, dict)]
    assert sorted(pip) == sorted(project["dependencies"])
    [python] = [item for item in conda["dependencies"] if str(item).startswith("python")]
    assert python.removeprefix("python=") == project["requires-python"].removeprefix(">=")


def test_project_and_distribution_have_the_same_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == MLPROJECT["name"] == "headroom"


def test_mlproject_declares_every_entry_point() -> None:
    assert sorted(MLPROJECT["entry_points"]) == sorted([*entry_points(), "compare"])


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_every_technique_has_an_entry_point_that_varies_it(technique: str) -> None:
    assert technique in entry_points()
    comparisons = read_yaml(FOLDER / f"{technique}.yaml")["comparisons"].values()
    variants = [variant for comparison in comparisons for variant in comparison["variants"].values()]
    assert any(set(variant) & set(TECHNIQUES[technique].model_fields) for variant in variants)


@pytest.mark.parametrize(("entry", "name", "spec"), DECLARED, ids=[f"{e}-{n}" for e, n, _ in DECLARED])
def test_a_declared_parameter_reaches_the_command(entry: str, name: str, spec: dict[str, Any]) -> None:
    parameters = {key: f"value-of-{key}" for key in MLPROJECT["entry_points"][entry]["parameters"]}
    words = shlex.split(MLPROJECT["entry_points"][entry]["command"].format(**parameters))
    assert words[:4] == ["python", "-m", "pipeline", entry]
    assert dict(dotted(parse(entry, words[4:])))[name] == f"value-of-{name}"


@pytest.mark.parametrize(("entry", "name", "spec"), DECLARED, ids=[f"{e}-{n}" for e, n, _ in DECLARED])
def test_a_declared_default_is_the_codes_own(entry: str, name: str, spec: dict[str, Any]) -> None:
    assert type(spec["default"]) is TYPES[spec["type"]]
    default = code_default(entry, name)
    assert spec["default"] == ("none" if default is None else type(spec["default"])(default))


@pytest.mark.parametrize("entry", entry_points())
def test_yaml_says_only_what_differs(entry: str) -> None:
    own = OWN_SETTINGS.get(entry)
    for file in [FOLDER / f"{entry}.yaml"] if entry not in SINGLE else (FOLDER / "single").glob("*.yaml"):
        values = {k: v for k, v in read_yaml(file).items() if k not in ("question", "comparisons", "space")}
        defaults = dict(dotted({k: plain(f.default) for k, f in settings_of(entry).model_fields.items()}))
        same = {k for k, v in values.items() if defaults[k] == v} - ({"precision"} if file.stem == "fp32" else set())
        assert not same, f"{file} repeats the defaults of {same} ({own})"


def plain(default: Any) -> Any:
    return default.model_dump() if isinstance(default, Settings) else default


def test_no_file_names_a_machine_or_a_registry() -> None:
    forbidden = re.compile(r"/root/|/work/|/opt/|index-url|pypi\.org|Claude|Anthropic", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (n for n in listed if n != "tests/test_project.py" and (ROOT / n).exists()):
        assert not forbidden.search((ROOT / name).read_text(errors="ignore")), name
