"""`@pytest.mark.gpu_memory`: tests that pytest runs on simulated cards, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT, own_cache
from test_simulate import needs_cuda_build

CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--rows", type=int, default=0)

@pytest.fixture(scope="module")
def rows(request):
    return request.config.getoption("--rows")
"""
TESTS = """
import pytest
import torch

is_large = pytest.mark.gpu_memory(gpu="a100", max_allocated="32MiB")

def train(rows):
    weight = torch.nn.Parameter(torch.ones(rows, 1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    for _ in range(2):
        weight.square().sum().backward()
        optimizer.step()

def test_plain(rows):
    assert rows == 4096

@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.gpu_memory(gpu="t4", max_allocated="1GiB", max_reserved="50%")
@pytest.mark.parametrize("name", ["a/b::c[d]"])
def test_fits(rows, name, tmp_path):
    assert torch.cuda.get_device_name() == "Tesla T4"
    train(rows)

@is_large
def test_is_too_large(rows):
    train(rows)

@pytest.mark.gpu_memory(gpu="a100")
def test_has_no_limit():
    pass
"""
EXPECTED = """
import os
import pytest
from test_training import is_large, train

@is_large
@pytest.mark.xfail(strict=True, reason="known")
@pytest.mark.parametrize("rows", [16, 4096])
def test_is_expected_to_be_too_large(rows):
    train(rows)

@is_large
@pytest.mark.parametrize("rows", [16])
def test_fails_by_itself(rows):
    print("of the test")
    train(rows)
    assert rows == 17

@is_large
def test_is_skipped():
    pytest.skip("not today")

@is_large
def test_ends_its_process():
    os._exit(3)
"""
ACCEPTED = """
import pytest
from test_training import train

@pytest.mark.gpu_memory(gpu="a100", baseline="memory.json")
def test_needs_what_it_did():
    train(4096)
"""
ON_ANOTHER_CARD = """
import pytest
import torch

def test_has_a_gpu():
    assert "H200" in torch.cuda.get_device_name() and torch.ones(1, device="cuda").is_cuda

@pytest.mark.gpu_memory(gpu="t4", max_reserved="1GiB")
def test_has_another():
    assert "T4" in torch.cuda.get_device_name()
    torch.ones(1024, device="cuda").requires_grad_().sum().backward()

def test_still_has_it():
    assert "H200" in torch.cuda.get_device_name() and torch.ones(1, device="cuda").is_cuda
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Give a cache folder of the test's own."""
    return own_cache(tmp_path / "cache")


def run_pytest(
    folder: Path, cache: Path, *words: str, python: tuple[str, ...] = (sys.executable,)
) -> tuple[str, dict[str, ElementTree.Element]]:
    """Run pytest in a folder and return its output, and the test cases of its report by their names."""
    report = folder / "report.xml"
    command = [*python, "-m", "pytest", f"--junitxml={report}", "-p", "no:cacheprovider", *words]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = {**inherited, "FITPROOF_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    return done.stdout, {str(case.get("name")): case for case in ElementTree.parse(report).iter("testcase")}


def outcome(case: ElementTree.Element) -> str:
    """Return the outcome of a test case and what is said of it."""
    found = [f"{it.tag}: {it.get('message')} {it.text}" for it in case if it.tag in ("failure", "error", "skipped")]
    return "\n".join(found) or "passed"


@needs_cuda_build
def test_a_marked_test_runs_on_its_card_with_fixtures_and_outcomes_of_its_own(tmp_path: Path, own: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_training.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --rows 4096 -n 1")
    said, cases = run_pytest(tmp_path, own)
    outcomes = {name: outcome(case) for name, case in cases.items()}
    assert outcomes["test_plain"] == outcomes["test_fits[a/b::c[d]]"] == "passed"
    properties = {it.get("name"): it.get("value") for it in cases["test_fits[a/b::c[d]]"].iter("property")}
    assert int(str(properties["peak_allocated_bytes"])) >= 4 * 4096 * 1024 * 4
    too_large = outcomes["test_is_too_large"]
    assert too_large.startswith("failure: ") and "MiB more than the limit of 32MiB" in too_large
    assert "at test_training.py:11" in too_large and "16.0 MiB  parameters of test_training.py:8" in too_large
    assert "memory of NVIDIA A100" in said
    assert "with a limit or with a baseline, and neither is given" in outcomes["test_has_no_limit"]
    assert len(outcomes) == 4


@pytest.mark.slow
@needs_cuda_build
def test_a_test_may_be_expected_to_need_too_much_fail_by_itself_be_skipped_or_end_its_process(
    tmp_path: Path, own: Path
) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    (tmp_path / "test_expected.py").write_text(EXPECTED)
    said, cases = run_pytest(tmp_path, own, "test_expected.py")
    outcomes = {name: outcome(case) for name, case in cases.items()}
    assert outcomes.pop("test_is_expected_to_be_too_large[4096]").startswith("skipped: known")
    assert "XPASS(strict)" in outcomes.pop("test_is_expected_to_be_too_large[16]")
    assert "assert 16 == 17" in outcomes.pop("test_fails_by_itself[16]") and "of the test" in said
    assert outcomes.pop("test_is_skipped").startswith("skipped: not today")
    [(name, ended)] = outcomes.items()
    assert name == "test_ends_its_process"
    assert "ended before the test did. Not checked. No verdict: the command ended with exit code 3" in ended


@pytest.mark.slow
@needs_cuda_build
def test_a_baseline_of_a_test_is_written_and_compared(tmp_path: Path, own: Path) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    script = tmp_path / "test_accepted.py"
    script.write_text(ACCEPTED)
    _, cases = run_pytest(tmp_path, own, "test_accepted.py", "--update-gpu-memory")
    assert outcome(cases["test_needs_what_it_did"]) == "passed" and (tmp_path / "memory.json").exists()
    script.write_text(ACCEPTED.replace("4096", "5120"))
    _, cases = run_pytest(tmp_path, own, "test_accepted.py")
    assert "(25.00 %) more than the 96.0 of the baseline; memory.json + 1 % allows" in (
        outcome(cases["test_needs_what_it_did"])
    )


@pytest.mark.slow
@needs_cuda_build
def test_tests_that_use_cuda_are_left_alone_where_there_is_a_gpu(tmp_path: Path, own: Path) -> None:
    """Which is another simulated card."""
    (tmp_path / "test_training.py").write_text(ON_ANOTHER_CARD)
    on_card = (sys.executable, str(ROOT / "tests" / "cuda_without_gpu" / "cards.py"), "h200")
    _, cases = run_pytest(tmp_path, own, python=on_card)
    assert {name: outcome(case) for name, case in cases.items()} == dict.fromkeys(
        ("test_has_a_gpu", "test_has_another", "test_still_has_it"), "passed"
    )


def test_the_plugin_imports_nothing_of_fitproof() -> None:
    """Pytest loads it for every project of the environment, which may have a package called pipeline."""
    code = "import sys, pytest_fitproof; print({'fitproof', 'pipeline', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
