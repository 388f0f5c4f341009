"""The Python API: what README shows runs, and gives what the command line gives."""

import ast
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, TINY, own_cache
from finished import shorten_finetune
from project import Project, new_store

import fitproof
from pipeline.base.errors import InvalidInputError, NothingMeasuredError
from pipeline.cli import settings_of
from pipeline.config.options import (
    CompareOptions,
    ExportOptions,
    FinetuneOptions,
    PlanOptions,
    ProfileOptions,
    RunOptions,
    SearchOptions,
    SimulateOptions,
)
from pipeline.config.settings import AllSettings
from pipeline.planning.plan import PlanFindings
from pipeline.report.comparison import ComparisonFindings
from pipeline.report.findings import read_findings
from pipeline.searching.results import SearchFindings

BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for page in (
        "README.md",
        "docs/prediction.md",
    )
}
SMALL = {**{k: v for k, v in TINY.items() if k not in ("model", "device")}, "timing_warmup_steps": 2, "num_steps": 4}
FEW = {"micro_batch_size": [1, 2], "checkpointing": ["none"], "precision": ["fp32", "bf16"]}


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty current folder, and a tracking store of its own in another one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path_factory.mktemp("store")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def output_of(block: str, project: Project) -> list[str]:
    """Run a page's Python as a script, whose calls are given settings that make them short; return what it prints."""
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("plan", "search"):
            given = {word.arg for word in node.keywords}
            small = {
                **SMALL,
                "space": FEW,
                **({"num_trials": 2, "verify_steps": 0} if node.func.attr == "search" else {}),
            }
            more = {
                name: ast.parse(repr(value), mode="eval").body for name, value in small.items() if name not in given
            }
            node.keywords += [ast.keyword(name, value) for name, value in more.items()]
    (project.folder / "notebook.py").write_text(ast.unparse(ast.fix_missing_locations(tree)))
    done = project.call("python", "notebook.py")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    project = Project.copy(tmp_path)
    [block] = BLOCKS["README.md"]
    question, answer, in_frame, *rows, last, of_export, files, _ = output_of(block, project)
    assert question.startswith("What would gpt2 need") and answer.startswith("Start with") and "to_frame()" in in_frame
    assert last.startswith("Train with micro-batch ") and rows[-2].startswith("[4 rows x ")
    assert len(ast.literal_eval(rows[-1])) == 4
    assert of_export == "Which files train best.yaml in other frameworks?" and "README.md there says how" in files
    assert len(project.children_of(project.parent_of("search"))) == 2


@pytest.mark.slow
def test_the_python_of_the_page_on_predictions_runs(tmp_path: Path) -> None:
    [block] = BLOCKS["docs/prediction.md"]
    *rows, breakdown = output_of(block, Project.copy(tmp_path))
    assert len(rows) == 3 and all(row.endswith(" True") for row in rows) and "'parameters': " in breakdown


def test_random_numbers_of_other_threads_are_their_own_while_memory_is_predicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITPROOF_CACHE", str(own_cache(folder / "cache")))
    drawn, stop = set[float](), threading.Event()

    def draw() -> None:
        while not stop.wait(0.001):
            torch.manual_seed(1)
            drawn.add(torch.rand(1).item())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        findings = fitproof.plan(gpu="t4", effective_batch_size=2, model="gpt2-nano", space=FEW, **SMALL)
    finally:
        stop.set()
        thread.join()
    assert len(findings.cards[0].rows) == 2
    assert drawn == {torch.rand(1, generator=torch.Generator().manual_seed(1)).item()}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("more", [{"space": FEW}, {"space": FEW, "max_grad_norm": 1.0, "budget": "1MiB"}], ids=str)
@pytest.mark.parametrize("function", [fitproof.plan, fitproof.longest])
def test_nothing_is_predicted_in_the_process_of_the_user(
    function: Any, more: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where functions of torch are replaced."""
    monkeypatch.setenv("FITPROOF_CACHE", str(folder))
    settings = {**SMALL, "gpu": "t4", "effective_batch_size": 2, "model": "gpt2-nano"}
    here = Mock(side_effect=AssertionError("in this process"))
    monkeypatch.setattr("pipeline.prediction.fake.recording.simulated", here)
    with suppress(InvalidInputError):  # 1 MiB is less than the parameters
        function(**{**settings, **more})
    assert not here.called


def test_a_plan_is_what_the_command_logs_and_logs_nothing_unless_asked(folder: Path) -> None:
    settings = {**SMALL, "model": "gpt2-nano", "gpu": "rtx4090,t4", "effective_batch_size": 2, "space": FEW}
    planned = fitproof.plan(**settings)
    assert list(folder.iterdir()) == []
    assert isinstance(planned, PlanFindings)
    assert planned.recommended is not None and planned.recommended.fits
    assert [len(card.rows) for card in planned.cards] == [4, 2]
    again = fitproof.plan(**settings, log=True)
    assert again == planned
    [logged] = folder.glob("runs/*-plan-*")
    assert read_findings(logged).cards == planned.cards  # type: ignore[union-attr]


def test_a_plan_of_several_effective_batches_has_each_card_with_each(folder: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "model": "gpt2-nano", "gpu": "rtx4090,t4", "space": FEW}
    planned = fitproof.plan(**settings, effective_batch_sizes=[2, 4], log=True)
    assert [(card.effective_batch_size, len(card.rows)) for card in planned.cards] == [(2, 4), (4, 4), (2, 2), (4, 2)]
    alone = fitproof.plan(**settings, effective_batch_size=4)
    assert (planned.cards[1].rows, planned.cards[3].rows) == tuple(card.rows for card in alone.cards)
    assert planned.effective_batch_sizes == (2, 4) and planned.effective_batch_size == 2
    [logged] = folder.glob("runs/*-plan-*")
    page = (logged / "report.html").read_text()
    for words in ("effective batch of 2 or 4 on", "Tesla T4 (effective batch 4)", ">effective batch 2</button>"):
        assert words in page
    with pytest.raises(
        InvalidInputError,
        match=r"effective_batch_size \(2\) or effective_batch_sizes \(\[2\]\), and both are given; leave one",
    ):
        fitproof.plan(**settings, effective_batch_sizes=[2], effective_batch_size=2)


def test_nothing_fits_is_none(folder: Path) -> None:
    planned = fitproof.plan(
        **SMALL, model="gpt2-nano", gpu="cpu", effective_batch_size=2, space=FEW, budget="0.3MiB", device="cpu"
    )
    assert planned.recommended is None


def test_a_search_returns_what_it_logs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fitproof.search(
        **SMALL, device="cpu", budget="64MiB", effective_batch_size=2, space=FEW, num_trials=2, verify_steps=0
    )
    assert isinstance(found, SearchFindings)
    assert found.best is not None and found.best.fits and len(found.rows) == 2
    [logged] = folder.glob("runs/*-search-*")
    assert read_findings(logged).rows == found.rows  # type: ignore[union-attr]
    assert capsys.readouterr().out == ""


def check_shown(result: Any) -> None:
    assert len(repr(result).splitlines()) == 3 and "<table" in result._repr_html_() and len(result.to_frame()) > 1
    with pytest.raises(FrozenInstanceError):
        setattr(result, fields(result)[0].name, None)


def test_profile_compare_and_export_return_what_their_commands_find(folder: Path) -> None:
    runs = [fitproof.profile(**SMALL, device="cpu", model="gpt2-nano", micro_batch_size=size) for size in (1, 2)]
    logged = sorted(folder.glob("runs/*-profiling-*"), key=lambda each: each.stat().st_mtime)
    assert [read_findings(each).row for each in logged] == [one.row for one in runs]  # type: ignore[union-attr]
    compared = fitproof.compare(filter="params.precision = 'fp32'")
    assert isinstance(compared, ComparisonFindings)
    assert {row.params["micro_batch_size"] for row in compared.rows} == {1, 2} and len(compared.run_ids) == 2
    assert not list(folder.glob("runs/*-compare-*")), "it is logged if asked to"
    exported = fitproof.export(config=next(logged[0].glob("*/config.yaml")), output="files")
    assert {file.name: file.read_text() for file in (folder / "files").iterdir()} == exported.files
    for result in (*runs, compared, exported):
        check_shown(result)


@pytest.mark.slow
def test_finetune_returns_what_its_command_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project.copy(tmp_path)
    shorten_finetune(project)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", project.store)
    settings: dict[str, Any] = {**SMALL, "model": "gpt2-nano", "effective_batch_size": 4, "budget": "64MiB"}
    planned = fitproof.finetune(**settings, gpu="cpu")
    assert [(card.kind, card.recommended is not None) for card in planned.cards] == [("full", True), ("lora", True)]
    assert not (tmp_path / "runs").exists()
    few: dict[str, Any] = {"num_trials": 2, "verify_steps": 0, "space": {"micro_batch_size": "divisors"}}
    found = fitproof.finetune(**settings, **few, device="cpu")
    [kinds], [search] = (list(tmp_path.glob(f"runs/*-{entry}-*")) for entry in ("finetune", "search"))
    assert found.searched is not None and found.kind == "full" and found.answer.startswith("full was searched: Train")
    assert found.searched.rows == read_findings(search).rows  # type: ignore[union-attr]
    assert found.kinds.rows == read_findings(kinds).rows  # type: ignore[union-attr]
    for result in (planned, found):
        check_shown(result)


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (fitproof.finetune, {"kind": "lorra"}, "kind must be auto or one of full, .*, and is 'lorra'"),
        (fitproof.finetune, {"gpu": "unknown"}, "no card is called 'unknown'"),
        (fitproof.longest, {"sequence_length": 512}, "longest finds sequence_length, and 512 is given; leave it out"),
        (fitproof.profile, {"precison": "fp32"}, "no setting is called precison; did you mean precision"),
        (fitproof.compare, {}, "compare needs runs"),
        (fitproof.export, {"config": "absent.yaml"}, "absent.yaml must be a readable file"),
    ],
)
def test_wrong_input_of_the_other_functions_raises(
    function: Any, wrong: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        function(**wrong)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("function", [fitproof.plan, fitproof.search])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precison": "fp32"}, "no setting is called precison; did you mean precision"),
        ({"model": "gpt3"}, "no model is called 'gpt3'"),
        ({"effective_batch_size": "many"}, "effective_batch_size must be a valid integer"),
    ],
)
def test_wrong_input_raises(function: Any, wrong: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        function(**{**SMALL, "effective_batch_size": 2, **wrong})
    assert list(folder.iterdir()) == []


def test_importing_it_loads_nothing_heavy() -> None:
    words = "import sys; from fitproof import plan, search; print([m for m in ('torch', 'mlflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_results_show_themselves_and_are_frames(folder: Path) -> None:
    planned = fitproof.plan(
        **SMALL, model="gpt2-nano", gpu="cpu", effective_batch_size=2, space=FEW, budget="64MiB", device="cpu"
    )
    assert len(repr(planned).splitlines()) == 3 and "Start with" in repr(planned)
    frame = planned.to_frame()
    assert len(frame) == len(planned.cards[0].rows) == 4 and {"fits", "tokens/s"} <= {*frame.columns}
    shown = planned._repr_html_()
    assert "<table" in shown and "start here" in shown and planned.answer.split(":")[0] in shown


def test_a_search_that_measured_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.jobs.search.run_search", lambda *_: None)  # as if its time was over before a trial
    with pytest.raises(NothingMeasuredError, match="raise search_time_limit"):
        fitproof.search(**SMALL, device="cpu", budget="64MiB", effective_batch_size=2, space=FEW)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "entry", "without"),
    [
        (RunOptions, None, set[str]()),
        (PlanOptions, "plan", set[str]()),
        (SearchOptions, "search", set[str]()),
        (FinetuneOptions, "finetune", {"gpu"}),
        (ProfileOptions, "profiling", set[str]()),
        (CompareOptions, "compare", set[str]()),
        (ExportOptions, "export", set[str]()),
        (SimulateOptions, "simulate", {"gpu", "command", "answer", "output"}),
    ],
)
def test_the_typed_settings_are_all_settings(options: Any, entry: str | None, without: set[str]) -> None:
    kind = AllSettings if entry is None else settings_of(entry)
    assert {*options.__annotations__} | without == {*kind.model_fields}
