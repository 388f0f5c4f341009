"""The documentation is true: its commands run, its links lead somewhere, its numbers are those of committed files."""

import ast
import csv
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ROOT
from processes import free_port, started, wait_for
from project import SMALL, Project
from test_entry_points import PER_STEP

from pipeline.base.by_key import grouped
from pipeline.base.technique import Technique
from pipeline.cli import parse
from pipeline.config.entry_points import TOOLS, entry_points, questions
from pipeline.config.given import dotted, setting_names
from pipeline.config.settings import AllSettings
from pipeline.config.variants import load_entry_point
from pipeline.tracking.metric_names import SUMMARIES

PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
README_LINES = 160
SUMMARY_LINES = 10
WORDS = "the fastest way to train a model in the memory you have "
COMPUTED = ("worst error", "bound true")
"""Words of tables that are computed from several committed rows, in tests of their own."""
NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w-])")
EXAMPLES = re.compile(r"\brates\b|rmsprop_alpha")
"""What docs/architecture.md shows how to add."""
REPLAYS = ("gpt2-nano_2026-11-21", "llama-nano_2026-11-21", "qwen3-nano_2026-11-22")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), re.DOTALL)


def commands(page: str) -> list[str]:
    """Return the commands of a page, without comments."""
    lines = [
        line.split("  #")[0].strip() for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()
    ]
    return [line for line in lines if line]


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table, row by row, the header first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[line.strip().strip("|").split("|") for line in table.splitlines()] for table in found]
    return [[[cell.strip() for cell in row] for row in table if not set("".join(row)) <= set("-: ")] for table in rows]


def numbers(text: str) -> list[str]:
    return [number.replace(",", "").lstrip("+") for number in NUMBER.findall(text)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


README_COMMANDS = commands("README.md")
HERE = [command for command in README_COMMANDS if command.startswith("fitproof")]
THROUGH_MLFLOW = [command for command in README_COMMANDS if command.startswith("mlflow")]


@pytest.mark.quick
def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= README_LINES


@pytest.mark.quick
@pytest.mark.parametrize("page", ["prediction", "search", "evidence", "reliability", "scaling"])
def test_pages_of_method_and_proof_begin_with_a_summary(page: str) -> None:
    _, summary, *_ = text_of(f"docs/{page}.md").split("\n\n")
    assert summary.startswith("**In short:**") and len(summary.splitlines()) <= SUMMARY_LINES


# Commands


def settings_in(words: list[str]) -> dict[str, str]:
    """Return the settings of a command: --name value, or -P name=value."""
    if words[0] == "mlflow":
        given = [word for before, word in pairwise(words) if before == "-P"]
        return dict(word.split("=", 1) for word in given)
    if "--" in words:  # what follows is a command of the user's own
        words, own = words[: words.index("--")], words[words.index("--") + 1 :]
        return {**settings_in(words), "command": shlex.join(own)}
    return {name.removeprefix("--"): value for name, value in pairwise(words) if name.startswith("--")}


def entry_and_settings(command: str) -> tuple[str, dict[str, str]]:
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["mlflow", "run"]:
        return words[words.index("-e") + 1], settings_in(words)
    if words[:3] == ["python", "-m", "fitproof"]:
        words = ["fitproof", *words[3:]]
    return (words[1] if len(words) > 1 else ""), settings_in(words)


@pytest.mark.parametrize("page", PAGES)
def test_entry_points_and_settings_of_commands_exist(page: str) -> None:
    """Those of the examples in docs/architecture.md have tests of their own."""
    for command in commands(page):
        entry, given = entry_and_settings(command)
        if command.startswith(("fitproof ", "python -m fitproof ", "mlflow run ")) and not EXAMPLES.search(command):
            assert entry in (*entry_points(), *TOOLS)
            words = [word for name, value in given.items() for word in (f"--{name}", value)]
            assert {name for name, _ in dotted(parse(entry, words))} == set(given)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Give a project with some text of its own and with the answer of a search, as the README presumes."""
    project = Project.copy(tmp_path_factory.mktemp("project"))
    (project.folder / "my_text").mkdir()
    (project.folder / "my_text" / "one.txt").write_text(WORDS * 500)
    (project.folder / "best.yaml").write_text("precision: bf16\n")
    return project


def tiny(entry: str, given: dict[str, str]) -> dict[str, str]:
    """Return the settings of a command of the README with others that make it short."""
    if entry in TOOLS:
        return given
    few = {"space": '{"micro_batch_size": [1, 2]}'} if entry in ("plan", "search") else {}
    short = {"budget": "64MiB", "num_trials": "2", "verify_steps": "0"} if entry == "search" else {}
    made = {**SMALL, **few, **short, **given}
    if "num_epochs" in given:  # of which the number of steps follows
        del made["num_steps"]
        made["num_epochs"] = "0.02"
    return made


@pytest.mark.parametrize(
    "command",
    [pytest.param(it, marks=[pytest.mark.slow] if re.search("ray|--workers|text_files", it) else []) for it in HERE],
)
def test_a_command_of_the_readme_runs(command: str, project: Project) -> None:
    """`fitproof` is `python -m fitproof`, and runs in this process."""
    entry, given = entry_and_settings(command)
    done = project.here(entry, tiny(entry, given)) if entry else project.call("python", "-m", "fitproof")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", THROUGH_MLFLOW)
def test_a_command_of_the_readme_runs_through_mlflow(command: str, project: Project) -> None:
    entry, given = entry_and_settings(command)
    more = {name: value for name, value in tiny(entry, given).items() if name not in given}
    done = project.call(*shlex.split(command), *(word for k, v in more.items() for word in ("-P", f"{k}={v}")))
    assert done.returncode == 0, done.stderr


def test_all_commands_of_the_readme_are_tested() -> None:
    assert len(HERE) >= 5 and THROUGH_MLFLOW
    others = set(README_COMMANDS) - {*HERE, *THROUGH_MLFLOW}
    assert others == {"make ui"}


def test_make_search_is_the_search_through_mlflow(project: Project) -> None:
    arguments = "-P budget=64MiB -P study=make"
    words = ["mlflow", "run", ".", "-e", "search", "--env-manager=local", "--experiment-name", "fitproof"]
    only_printed = ("-n", "--no-print-directory", "-o", ".venv/installed")
    done = project.call("make", *only_printed, "search", f"ARGS={arguments}")
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[1:] == [*words, *shlex.split(arguments)]


def test_continuous_integration_runs_all_targets_of_tests() -> None:
    commands = [line for line in text_of(".ci/run").splitlines() if line.startswith("make")]
    assert commands == ["make --jobs 2 test", "make test-many-workers", "make --jobs 2 test-cluster test-cuda"]


def test_the_makefile_names_every_file_with_a_test_of_four_ranks() -> None:
    files = sorted((ROOT / "tests").glob("test_*.py"))
    mark = re.compile("^from conftest import .*FOUR_RANKS", re.MULTILINE)
    marked = [f"tests/{file.name}" for file in files if mark.search(file.read_text())]
    [named] = re.findall("^OF_FOUR_RANKS := (.+)$", text_of("Makefile"), re.MULTILINE)
    assert named.split() == marked


@pytest.mark.slow
def test_make_ui_shows_the_runs_to_this_machine_alone(project: Project) -> None:
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


def venv_bin() -> Path:
    return Path(sys.executable).parent


# Names


def test_the_readme_lists_every_entry_point_with_its_question() -> None:
    [table] = [table for table in tables(text_of("README.md")) if table[0] == ["entry point", "question"]]
    listed = {entry.strip("`"): question for entry, question in table[1:]}
    expected = {**questions(), **TOOLS}
    assert listed == {name: question.partition("?")[0] + "?" for name, question in expected.items()}


def layers_of_the_contract() -> list[set[str]]:
    contracts = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [set(layer.split(" | ")) for layer in layers]


def test_the_layers_are_those_of_the_contract() -> None:
    [table] = [table for table in tables(text_of("docs/architecture.md")) if table[0][0] == "layer"]
    layers = [set(re.findall(r"`(\w+)`", row[1])) for row in table[1:]]
    assert layers == layers_of_the_contract()
    assert [int(row[0]) for row in table[1:]] == [*range(len(layers), 0, -1)]


def test_the_diagram_of_the_architecture_page_has_every_folder_in_its_layer() -> None:
    [diagram] = [block for block in blocks("docs/architecture.md", "mermaid") if block.startswith("flowchart")]
    layers = [set(re.findall(r"<b>(\w+)/</b>", line)) for line in diagram.splitlines() if "<b>" in line]
    assert layers == [layer for layer in layers_of_the_contract() if (ROOT / "pipeline" / min(layer)).is_dir()]
    folders = {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}
    assert set().union(*layers) == folders


@pytest.mark.parametrize("page", PAGES)
def test_dotted_settings_exist(page: str) -> None:
    """Those of models and corpora; commands name the others."""
    families = {name.partition(".")[0] for name in setting_names(AllSettings) if "." in name}
    named = {name for name in re.findall(r"`(\w+\.\w+)`", text_of(page)) if name.partition(".")[0] in families}
    assert named <= set(setting_names(AllSettings))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(r"`((?:pipeline|tests|benchmarks|experiments)/[\w/.-]*[\w/])`", text_of(page))
    of_family = re.findall(r"`((?:base|training|searching|techniques|models|data|export)/[\w/]*)`", text_of(page))
    files = [*named, *(f"pipeline/{name}" for name in of_family if name not in SUMMARIES.values())]
    missing = [name for name in files if not (ROOT / name).exists()]
    assert not missing


def test_what_a_technique_declares_exists() -> None:
    [table] = [t for t in tables(text_of("docs/architecture.md")) if t[0][0] == "what a technique may declare"]
    for row in table[1:]:
        assert hasattr(Technique, re.match(r"`(\w+)", row[0])[1]), row[0]  # type: ignore[index]


def test_every_metric_is_explained_with_its_name_in_files() -> None:
    explained = set()
    for table in tables(text_of("docs/metrics.md")):
        for logged, in_files, *_ in table[1:] if table[0][0] == "metric" else []:
            names = re.findall(r"`([\w/]+)`", logged)
            own = re.findall(r"`(\w+)`", in_files) or [name.partition("/")[2] for name in names]
            explained |= set(zip(names, own, strict=False))
    assert {name for name, _ in explained} >= PER_STEP
    assert explained >= {(name, own) for own, name in SUMMARIES.items()}


def test_every_fault_of_the_reliability_page_has_its_test() -> None:
    rows = [line for line in text_of("docs/reliability.md").splitlines() if line.startswith("| ")][1:]
    named = [re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row) for row in rows]
    assert len(rows) >= 11 and all(named)
    for found in filter(None, named):
        assert f"\ndef {found[2]}(" in text_of(f"tests/{found[1]}"), found[0]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text_of(page)):
        if target.startswith("https://"):
            continue
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), anchor


def test_every_picture_is_used() -> None:
    used = {Path(target).name for page in PAGES for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text_of(page))}
    assert {picture.name for picture in (ROOT / "docs" / "images").iterdir()} <= used


# Examples


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page: str) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.slow
def test_the_technique_of_the_architecture_page_trains(tmp_path: Path) -> None:
    [block] = blocks("docs/architecture.md", "python")
    [command] = [command for command in commands("docs/architecture.md") if "FITPROOF_TECHNIQUES" in command]
    (tmp_path / "rmsprop.py").write_text(block)
    project = Project(tmp_path, {"FITPROOF_TECHNIQUES": "rmsprop", "PYTHONPATH": str(ROOT)})
    entry, given = entry_and_settings(command)
    assert "FITPROOF_TECHNIQUES=rmsprop " in command and given == {"rmsprop_alpha": "0.9"}
    done = project.pipeline(entry, {**SMALL, **given})
    assert done.returncode == 0, done.stderr
    _, run = project.only_run(entry)
    assert run.data.params["rmsprop_alpha"] == "0.9"
    assert run.data.metrics["check/prediction_error_percent"] == pytest.approx(0, abs=0.1)


def test_the_entry_point_of_the_architecture_page_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks("docs/architecture.md", "yaml")
    path, _, content = block.partition("\n")
    file = tmp_path / path.removeprefix("# ")
    file.parent.mkdir()
    file.write_text(content)
    monkeypatch.chdir(tmp_path)
    assert [variant.name for variant in load_entry_point(file.stem, {}).variants] == ["low", "high"]


def test_the_workflow_and_the_hook_of_the_page_on_ci_are_valid_and_their_checks_exist(tmp_path: Path) -> None:
    """By GitHub's schema of workflows, which check-jsonschema brings, and by pre-commit itself."""
    workflow, hooks = blocks("docs/ci.md", "yaml")
    (tmp_path / "check.yml").write_text(workflow)
    (tmp_path / "hooks.yaml").write_text(hooks)
    schema = ("check_jsonschema", "--builtin-schema", "vendor.github-workflows", "check.yml")
    for words in (schema, ("pre_commit", "validate-config", "hooks.yaml")):
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    steps = yaml.safe_load(workflow)["jobs"]["check"]["steps"]
    [step] = [step["run"] for step in steps if "fitproof check" in step.get("run", "")]
    [hook] = yaml.safe_load(hooks)["repos"][0]["hooks"]
    for command in (step, hook["entry"]):
        entry, given = entry_and_settings(command)
        assert (entry, given["command"]) == ("check", "python train.py")
        assert {name for name, _ in dotted(parse(entry, shlex.split(command)[2:]))} == set(given)


# Numbers


def sections_with_data(page: str) -> Iterator[tuple[str, str]]:
    """Yield each section of a page with the text of the committed files that it links to."""
    for section in re.split(r"^## ", text_of(page), flags=re.MULTILINE):
        links = re.findall(r"\]\(((?:\.\./)?benchmarks/[^)]+\.(?:md|csv))\)", section)
        if links:
            yield section, "\n".join(((ROOT / page).parent / link).read_text() for link in links)


@pytest.mark.parametrize("page", ["docs/evidence.md"])
def test_numbers_of_tables_are_those_of_the_files_that_the_section_links_to(page: str) -> None:
    """A number may be rounded; the first cell of a row is a label."""
    checked = 0
    for section, data in sections_with_data(page):
        measured = sorted({abs(float(number)) for number in numbers(data)})
        for table in tables(section):
            text = " ".join(cell for row in table for cell in row)
            if any(words in text for words in COMPUTED):
                continue
            for number in numbers(" | ".join(cell for row in table[1:] for cell in row[1:])):
                value, digits = abs(float(number)), len(number.partition("e")[0].partition(".")[2])
                exponent = int(number.partition("e")[2] or 0)
                half = 0.5000001 * 10.0 ** (exponent - digits)
                assert any(abs(value - one) <= half for one in measured), (number, table[0])
                checked += 1
    assert checked >= 30


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_errors_of_litgpts_peaks_are_those_of_its_rows(kind: str) -> None:
    with (ROOT / "benchmarks" / "litgpt_minutes_2026-11-28.csv").open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["difference_percent"] and row["config"].endswith(f"/{kind}.yaml")
        ]
    errors = [float(row["difference_percent"]) for row in rows]
    median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
    assert f"| {kind} | {len(errors)} | {median:.1f} % | {worst:+.1f} % |" in text_of("docs/evidence.md")


def model_of(configuration: str) -> str:
    """Return the row of the table that a configuration of the predictions' file belongs to."""
    values = dict(part.split("=") for part in configuration.split(", "))
    if values.get("sequences") == "padded":
        return "gpt2-nano and llama-nano, padded"
    if values["model"] != "gpt2-nano":
        return values["model"]
    wide = "256 wide" if "causal_lm.width" in values else f"{values.get('causal_lm.num_layers', 4)} layers"
    return f"gpt2-nano, {wide}"


def test_the_errors_of_other_models_are_those_of_their_file() -> None:
    with (ROOT / "benchmarks" / "other_models_cpu_2026-11-27.csv").open() as file:
        rows = list(csv.DictReader(file))
    errors = grouped(
        (row["of"] if row["of"] == "own function" else row["precision"], float(row["error_percent"])) for row in rows
    )
    words = " ".join(text_of("docs/prediction.md").split())
    assert len(errors["fp32"]) == 12 and not any(errors["fp32"])
    assert "twelve of twelve in fp32 are 0.00 % off" in words
    assert len(errors["bf16"]) == 6 and max(errors["bf16"]) <= 0
    assert f"six in bf16 at most {-min(errors['bf16']):.2f} % below" in words
    assert f"a function of one's own is {max(errors['own function'])} % above" in words


def test_the_table_of_predictions_is_that_of_its_file() -> None:
    with (ROOT / "benchmarks" / "prediction_cpu_2026-11-22.csv").open() as file:
        rows = list(csv.DictReader(file))
    groups = grouped((model_of(row["configuration"]), row) for row in rows)
    expected = []
    for model, own in groups.items():
        peaks = [int(row["measured_bytes"]) / 2**20 for row in own]
        worst = max(abs(float(row["error_percent"])) for row in own)
        expected.append([model, str(len(own)), f"{min(peaks):.0f} to {max(peaks):.0f}", f"{worst:.4f} %"])
    [table] = [table for table in tables(text_of("docs/evidence.md")) if "measured peaks, MiB" in table[0]]
    assert sorted(table[1:]) == sorted(expected)
    errors = [abs(int(row["predicted_bytes"]) - int(row["measured_bytes"])) for row in rows]
    shares = [100 * error / int(row["measured_bytes"]) for error, row in zip(errors, rows, strict=True)]
    evidence = " ".join(text_of("docs/evidence.md").split())
    assert f"{errors.count(0)} of {len(rows)} predictions are exact to the byte" in evidence
    assert f"the others within {max(errors)} bytes" in evidence and statistics.median(shares) < 0.0001
    assert f"{len(rows)} configurations, worst {max(shares):.4f} %" in evidence
    assert f"{len(rows)} predicted peaks were within {max(errors)} bytes" in " ".join(text_of("README.md").split())


def test_what_the_allocator_takes_as_lengths_vary_is_that_of_its_file() -> None:
    with (ROOT / "benchmarks" / "varying_lengths_2026-11-23.csv").open() as file:
        rows = list(csv.DictReader(file))
    reserved = [float(row["reserved_beyond_percent"]) for row in rows]
    expandable = [float(row["reserved_beyond_percent"]) for row in rows if row["expandable_segments"] == "True"]
    allocated = [float(row["allocated_beyond_percent"]) for row in rows]
    prediction = " ".join(text_of("docs/prediction.md").split())
    assert f"in {len(rows)} runs of 60 steps" in prediction
    assert f"reserved {min(reserved):.2f} to {max(reserved):.2f} % more than predicted" in prediction
    assert f"(median {statistics.median(reserved):.2f} %, with expandable segments" in prediction
    assert f"expandable segments at most {max(expandable):.2f} %)" in prediction
    assert f"allocated at most {max(allocated):.2f} % more" in prediction


def test_the_times_of_checks_are_those_of_their_file() -> None:
    with (ROOT / "benchmarks" / "check_times_2026-11-25.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = ("model", "card", "seconds_median", "seconds_least", "seconds_most", "processor_seconds_median")
    [table] = [table for table in tables(text_of("docs/ci.md")) if table[0][0] == "model"]
    cells = [[row[name] for name in columns] for row in rows]
    assert [[row[0], row[2], *row[3].split(" to "), row[4], row[5]] for row in table[1:]] == [
        [model, card, least, most, median, processor] for model, card, median, least, most, processor in cells
    ]


def test_the_table_of_bounds_is_that_of_the_replays() -> None:
    stated, true, lowest = [], [], []
    for name in REPLAYS:
        replay = text_of(f"benchmarks/search_replay_cpu_{name}.md")
        found = re.findall(r"^\|[^|]+\| predictive \|.*\| ([\d.]+) % of (\d+) \|$", replay, re.MULTILINE)
        shares = [(float(share), int(count)) for share, count in found]
        stated.append(sum(count for _, count in shares))
        true.append(100 * sum(round(share * count / 100) for share, count in shares) / stated[-1])
        lowest.append(min(share for share, _ in shares))
    [table] = [table for table in tables(text_of("docs/evidence.md")) if any("bound true" in row[0] for row in table)]
    assert [row[1:] for row in table[1:]] == [
        [str(count) for count in stated],
        [f"{share:.1f} %" for share in true],
        [f"{share:.1f} %" for share in lowest],
    ]
    first = "{:.1f}, {:.1f} and {:.1f} % of searches".format(*true)
    assert first in text_of("docs/evidence.md")
    assert f"true in {min(true):.1f} to {max(true):.1f} % of replayed searches" in " ".join(
        text_of("README.md").split()
    )


def test_the_table_of_several_workers_is_that_of_its_replays() -> None:
    [page] = tables(text_of("benchmarks/search_replay_parallel_2026-11-24.md"))
    lines = [dict(zip(page[0], row, strict=True)) for row in page[1:]]
    assert all(line["searches"] == "100" and line["over budget"] == "0" for line in lines)
    searches = grouped(((line["table"].split("_")[-2], line["budget MiB"]), line) for line in lines)

    def together(of_workers: list[dict[str, str]], column: str) -> str:
        return " / ".join(line[column].split(" (")[0].removesuffix(" of 100") for line in of_workers)

    columns = ("s to 2 %", "s to the certificate", "s in all", "trials", "certificate true", "bound true")
    expected = [[", ".join(key), *(together(rows, name) for name in columns)] for key, rows in searches.items()]
    [table] = [table for table in tables(text_of("docs/evidence.md")) if "the same in all" in table[0]]
    assert table[1:] == expected
    shares = {
        workers: [int(line["share"].split()[0]) for line in lines if line["workers"] == workers]
        for workers in ("1", "4", "16")
    }
    four, sixteen = (f"{min(shares[workers])} to {max(shares[workers])} %" for workers in ("4", "16"))
    assert f"With 4 workers the certificate was there after {four} of the time of one, with 16 after {sixteen}" in (
        " ".join(text_of("docs/search.md").split())
    )


def test_the_seconds_of_the_default_search_are_those_of_its_file() -> None:
    rows = tables(text_of("benchmarks/search_cpu_2026-11-22.md"))[1][1:]
    seconds, shares = [row[0] for row in rows], sorted(float(row[5].rstrip("%")) for row in rows)
    evidence = " ".join(text_of("docs/evidence.md").split())
    assert f"took {seconds[0]}, {seconds[1]} and {seconds[2]} s" in evidence
    assert f"{shares[0]} to {shares[-1]} % of it not spent measuring" in evidence
