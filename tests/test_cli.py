"""The command line: its list of entry points, the user's own YAML files, `--help`, and where files are found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from project import SMALL, Project, as_words

from pipeline.__main__ import gpu_of
from pipeline.base.errors import InvalidInputError
from pipeline.cli import main, parse, settings_of
from pipeline.config.entry_points import EXISTING, TOOLS, entry_points, find_file
from pipeline.config.given import nested, setting_names
from pipeline.config.variants import load_entry_point

RATES = """
question: Which learning rate is best?
num_steps: 5
sections: [smoothness]
comparisons:
  rates:
    baseline: low
    variants:
      low: {learning_rate: 1.0e-4}
      high: {learning_rate: 1.0e-3}
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("plan", "auto"),
        ("plan --gpu h100 --model gpt2", "h100"),
        ("plan --gpu=cpu", "cpu"),
        ("plan --gpu t4 --gpu=8xh100", "8xh100"),
        ("plan --gpu", "auto"),
        ("search --gpu a100 -- python train.py", "auto"),
        ("search -- python train.py --help", "auto"),
        ("plan --gpu h100 --help-all", None),
        ("sync --output runs", None),
        ("", None),
    ],
)
def test_the_card_is_known_before_settings_are_read(words: str, named: str | None) -> None:
    """It is none where no process will be needed that has imported torch."""
    assert gpu_of(words.split()) == named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a current folder with an empty folder `experiments`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    return tmp_path


def help_of(entry: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        parse(entry, [*(words or ("--help",))])
    return capsys.readouterr().out


def named(shown: str) -> set[str]:
    return set(re.findall(r"^  --(\S+)", shown, re.MULTILINE))


def test_the_list_of_entry_points_has_their_questions_and_imports_nothing_heavy() -> None:
    heavy = "('torch', 'transformers', 'mlflow', 'optuna', 'pandas', 'altair', 'vl_convert', 'pydantic', 'rich')"
    shown = f"atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))"
    code = f"import atexit, sys; {shown}; from pipeline.__main__ import run; run()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *shown, imported = done.stdout.splitlines()
    assert imported == "[]"
    for name in (*entry_points(), *TOOLS):
        [line] = [line for line in shown if line.startswith(f"  {name} ")]
        assert "?" in line


@pytest.mark.parametrize(
    "words",
    [
        ["main", "--config", "absent.yaml"],
        ["profiling", "--config=absent.yaml"],
        ["export"],
        ["report", "--folder", "runs/absent"],
        ["search", "--corpus", "chat", "--chat.path", "absent.jsonl"],
        ["checkpointing", "--corpus", "text_files", "--text_files.path", "absent"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_missing_is_answered_before_anything_heavy_is_imported(words: list[str], tmp_path: Path) -> None:
    heavy = "('torch', 'transformers', 'mlflow', 'optuna', 'pandas', 'pydantic', 'rich')"
    code = f"import sys; from pipeline.cli import main; print(main({words}), [m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "2 []\n"
    assert done.stderr.startswith("error: ") and "(No such file or directory); check the path in " in done.stderr


def test_every_setting_that_names_a_path_is_checked_or_is_written() -> None:
    """Of all entry points and tools; `output` is where files are written."""
    paths = set()
    for entry in (*entry_points(), *TOOLS):
        kind = settings_of(entry)
        for name in setting_names(kind):
            first, *others = name.split(".")
            field = kind.model_fields[first]
            for part in others:
                field = field.annotation.model_fields[part]  # type: ignore[union-attr]
            if field.annotation in (Path, Path | None):
                paths.add(name)
    assert paths == {*EXISTING, "output"}


@pytest.mark.parametrize(("words", "code"), [([], 0), (["main", "--modell", "gpt2-nano"], 2)])
def test_nothing_is_freed_at_the_end_which_lets_libraries_print_what_they_take_for_leaks(
    words: list[str], code: int
) -> None:
    """Triton's own classes are among them; functions that are registered with atexit are called."""
    script = (
        "import atexit, sys\n"
        "class Freed:\n"
        "    def __del__(self): print('leaked')\n"
        "freed = Freed()\n"
        "atexit.register(print, 'the end')\n"
        f"sys.argv[1:] = {words}\n"
        "from pipeline.__main__ import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "the end"


@pytest.mark.slow
@pytest.mark.matrix(1)
@pytest.mark.parametrize("command", [["fitproof"], ["python", "-m", "fitproof"]])
@pytest.mark.parametrize("path", ["", "."])
def test_a_folder_called_pipeline_does_not_shadow_the_command(command: list[str], path: str, tmp_path: Path) -> None:
    """Of the command itself, and of the processes that train."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").write_text("raise RuntimeError('the folder of the user')")
    script = Path(sys.executable).with_name(command[0])
    environment = {**os.environ, "PYTHONPATH": path} if path else os.environ
    words = [str(script), *command[1:], "main", *as_words(SMALL)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_own_entry_point_may_have_the_name_of_a_module(tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    (tmp_path / "experiments" / "page.yaml").write_text(RATES)
    project.succeed("page", SMALL)
    assert set(project.children_of(project.parent_of("page"))) == {"low", "high"}
    [page] = tmp_path.glob("runs/*-page-*/report.html")
    assert "<h2>smoothness of the training</h2>" in page.read_text()


def test_an_own_yaml_file_comes_before_fitproofs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "experiments" / "precision.yaml").write_text(RATES)
    (folder / "experiments" / "new.yaml").write_text(RATES)
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert "  precision      Which learning rate is best?" in listed and "  new            Which" in listed
    assert [variant.name for variant in load_entry_point("precision", nested(SMALL)).variants] == ["low", "high"]
    assert load_entry_point("accumulation", nested(SMALL)).sections == ("epoch", "smoothness")


def test_a_file_that_is_no_entry_point_does_not_disturb_the_list(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"broken": "a: [", "listed": "- a", "bare": "lr: 1"}.items():
        (folder / "experiments" / f"{name}.yaml").write_text(text)
    assert main([]) == 0
    assert "experiments/broken.yaml has no question" in capsys.readouterr().out
    assert main(["broken"]) == 2
    assert "experiments/broken.yaml must be plain YAML" in capsys.readouterr().err


def test_an_unknown_section_is_refused_before_anything_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "experiments" / "own.yaml").write_text(RATES.replace("smoothness", "page"))
    words = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["own", *words]) == 2
    names = "differences, epoch, kinds, recomputation, smoothness, stability, waterfall"
    assert f"no section of a report is called 'page'; the sections are {names}" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["experiments"]


def test_fitproofs_own_files_are_found_from_any_folder(folder: Path) -> None:
    path = Path("experiments/single/fp32.yaml")
    assert find_file(path).read_text() == (ROOT / path).read_text()
    (folder / "experiments" / "single").mkdir()
    (folder / path).write_text("precision: bf16\n")
    assert find_file(path).read_text() == "precision: bf16\n"
    assert find_file(Path("single/fp32.yaml")) == Path("single/fp32.yaml")


def test_help_has_what_is_set_most_with_an_example_and_the_entry_points_own_defaults(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (folder / "experiments" / "own.yaml").write_text(RATES)
    shown = help_of("own", capsys)
    assert "Which learning rate is best?" in shown
    assert "Optimizer steps to train. (default: 5)" in " ".join(shown.split())
    assert shown.count("\n  --") == 10 and "fitproof own --help-all lists all" in shown
    every = help_of("own", capsys, "--help-all")
    assert every.count("\n  --") == len(list(setting_names(settings_of("own")))) > 80
    assert "example: fitproof search --model gpt2" in help_of("search", capsys)


@pytest.mark.parametrize("entry", [*entry_points(), *TOOLS])
def test_every_entry_point_has_settings_that_most_people_set(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(entry, capsys).count("\n  --") >= min(10, len(list(setting_names(settings_of(entry)))))


def test_help_has_the_settings_of_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert not {"muon_momentum", "causal_lm.width", "chat.path"} & named(help_of("search", capsys))
    chosen = help_of("search", capsys, "--optimizer", "muon", "--model", "gpt2", "--corpus", "chat", "--help")
    assert {"muon_momentum", "causal_lm.width", "chat.path"} <= named(chosen) and "sgd_momentum" not in chosen


@pytest.mark.parametrize("tool", TOOLS)
def test_help_of_a_tool_shows_its_own_settings_alone(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(tool, capsys)
    assert f"settings of {tool}:" in shown and "--precision" not in shown


@pytest.mark.quick
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_what_it_does_before_its_code_is_imported(
    tool: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def stop(*_: object) -> None:
        said.append(capsys.readouterr().err)
        raise InvalidInputError("its settings would be imported here")

    monkeypatch.setattr("pipeline.cli.settings_of", stop)
    (folder / "best.yaml").touch()
    assert main([tool]) == 2
    assert said == [f"fitproof {tool}: {TOOLS[tool]}\n"]


def test_what_takes_more_than_a_word_is_json() -> None:
    assert parse("plan", ["--space", '{"precision": ["fp32"]}']) == {"space": {"precision": ["fp32"]}}
    with pytest.raises(InvalidInputError, match="space must be JSON, and is 'precision=fp32'"):
        parse("plan", ["--space", "precision=fp32"])
