"""The floors of pipeline/__init__.py, enforced."""

import ast
from pathlib import Path

import pytest
from conftest import ROOT

FLOORS = [
    ("contracts",),
    ("processes", "loading", "files", "entries"),
    ("crew", "interruption"),
    ("sequences", "memory", "metrics", "owner", "user_code"),
    ("text", "simulation"),
    ("techniques", "models", "data"),
    ("settings",),
    ("experiment",),
    ("space",),
    ("step", "variants", "environment"),
    ("train",),
    ("profile",),
    ("trace", "context"),
    ("execute", "predict"),
    ("handover",),
    ("tracking", "report"),
    ("publish",),
    ("measure", "compare", "planning", "profiling", "searching"),
    ("tools",),
    ("cli",),
    ("__main__",),
]
HOMES = {
    "mlflow": {"tracking"},
    "optuna": {"searching"},
    "matplotlib": {"report"},
    "yaml": {"experiment", "variants"},
    "multiprocessing": {"processes", "execute", "crew"},
    "rich": {"report", "publish", "measure", "compare", "planning", "profiling", "searching", "tools", "cli"},
    "jinja2": {"handover", "report"},
}
MODULES = sorted(file for file in (ROOT / "pipeline").rglob("*.py") if file.name != "__init__.py")


def place(file: Path) -> str:
    return file.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if name in names)


def imports(file: Path) -> list[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down_the_floors(file: Path) -> None:
    for name in imports(file):
        package, *rest = name.split(".")
        if package != "pipeline":
            assert place(file) in HOMES.get(package, {place(file)}), f"only {HOMES[package]} may import {package}"
        elif rest[0] == place(file) == "cli":
            continue
        elif rest[0] != place(file):
            # The command line names the settings of search before it decides what to load.
            assert floor(rest[0]) < floor(place(file)), f"{file.name} must not import {name}"


@pytest.mark.parametrize("package", ["techniques", "models", "data", "handover/targets"])
def test_members_of_a_family_do_not_know_each_other(package: str) -> None:
    for file in (ROOT / "pipeline" / package).glob("*.py"):
        assert not [name for name in imports(file) if name.startswith(f"pipeline.{package.replace('/', '.')}.")]


def test_every_module_stands_on_a_floor() -> None:
    assert {place(file) for file in MODULES} == {name for names in FLOORS for name in names}
