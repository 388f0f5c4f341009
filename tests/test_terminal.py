"""What a command says: at once what it does, how far it is, and its answer last; with and without a terminal."""

import io
import re
import threading
import time
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import started
from project import SMALL, Project
from rich.console import Console
from test_simulate import needs_cuda_build

from pipeline.base.progress import listening, progress
from pipeline.jobs.printing import wrapped
from pipeline.jobs.progress_bar import ProgressBar
from pipeline.runtime.run_folder import folder_name

SECONDS_TO_THE_FIRST_LINE = 2.0


@pytest.mark.quick
@given(
    st.lists(st.sampled_from(["peaks at", "12,345.6 MiB", "± 24 %", "8 x 1024", "of", "tokens/s"])), st.integers(24, 90)
)
def test_no_number_is_parted_from_its_unit(words: list[str], width: int) -> None:
    text = " ".join(words)
    lines = wrapped(text, width).splitlines()
    assert " ".join(lines) == text
    assert all(len(line) <= width for line in lines)
    assert not any(re.search(r"\d\n\D|(±|\bx)\n", f"{one}\n{next_one}") for one, next_one in pairwise(lines))


@pytest.mark.quick
def test_long_work_is_said_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.jobs.progress_bar.SECONDS_BETWEEN_LINES", (0.3,))
    out = io.StringIO()
    listener = ProgressBar(Console(file=out, width=len("predicting 8 configurations: 25% done, about 6")))
    with listening(listener), progress("predicting 8 configurations", 8) as advance:
        advance(2)
        time.sleep(2.2)
    first, second, third, *_ = out.getvalue().splitlines()
    assert first == "predicting 8 configurations ..."
    assert second == "predicting 8 configurations: 25% done, about"
    assert re.fullmatch(r"\d s left", third)


@pytest.mark.quick
def test_a_notebook_without_widgets_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.jobs.progress_bar.find_spec", lambda name: None)
    monkeypatch.setattr("pipeline.jobs.progress_bar.SECONDS_WITHOUT", 0.0)
    console = Console(file=(out := io.StringIO()))
    notebook = Mock(wraps=console, is_jupyter=True, is_terminal=False, width=console.width)
    with listening(ProgressBar(notebook)), progress("predicting"):
        time.sleep(1.5)
    assert out.getvalue() == "predicting ...\n"


@pytest.mark.quick
def test_short_work_is_not_said() -> None:
    out, before = io.StringIO(), {*threading.enumerate()}
    with listening(ProgressBar(Console(file=out))), progress("reading"):
        [thread] = {*threading.enumerate()} - before
    assert out.getvalue() == ""
    thread.join(timeout=10)
    assert not thread.is_alive(), "it ends with the work"


@pytest.mark.quick
def test_names_of_folders_have_no_spaces_colons_or_commas() -> None:
    assert folder_name("batch_of_32/32x1, run 2: bf16") == "batch_of_32-32x1-run-2-bf16"


def test_the_first_line_comes_before_torch_is_loaded(project: Project) -> None:
    start = time.monotonic()
    with started(project, "python", "-m", "fitproof", "main", "--device", "cpu") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - start
    assert line == "fitproof main: What does one configuration cost?\n"
    assert seconds < 5 * SECONDS_TO_THE_FIRST_LINE, seconds  # of a machine that runs other tests


def test_what_is_not_given_follows_from_what_is_and_the_answer_is_last(project: Project) -> None:
    done = project.here("main", {**SMALL, "effective_batch_size": "2", "num_steps": "3"})
    assert done.returncode == 0, done.stderr
    first, *course, results, title, command = done.stdout.splitlines()
    assert first.startswith("fitproof main: ") and "training 3 optimizer steps" in course
    assert re.search(r"^gpt2-nano \(1 of 1\): ok, [\d.]+ MiB, [\d,]+ tokens/s in [\d.]+ s$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"results: (runs/\S+/report\.html) and MLflow run \w+", results)
    assert (project.folder / results.split()[1]).exists()
    assert title == "profile it:" and command.startswith("  fitproof profiling ")
    assert done.stdout.index("gpt2-nano peaks at") > done.stdout.index("\nvariant ")


@pytest.mark.slow
@needs_cuda_build
def test_finetune_says_what_fits_a_card_and_trains_nothing(project: Project) -> None:
    few = {"model": "gpt2-nano", "gpu": "t4", "effective_batch_size": "1", "sequence_length": "64", "longest": "true"}
    said = project.succeed("finetune", few)
    assert re.search(r"On Tesla T4 \d of \d kinds fit: full \(.*sequences of up to [\d,]+ tokens\)", said)
    assert "fitproof finetune --model gpt2-nano" in said and "--kind full" in said
    assert not list(project.folder.glob("runs/*-finetune-*/*/config.yaml"))
