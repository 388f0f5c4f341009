"""The cache of recorded timelines: what invalidates it, its bound, and its size."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny

from pipeline.base.contracts import Hardware
from pipeline.memory.timeline import Timeline
from pipeline.prediction import trace_cache
from pipeline.prediction.cards import find_card
from pipeline.prediction.trace_cache import CODE, code_digest, find_trace, trace_file, write_trace

CPU = Hardware(kind="cpu", name="a CPU", memory_bytes=2**34, capability=None, num_multiprocessors=None)
EMPTY = Timeline.of((), (), spans=())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache folder."""
    monkeypatch.setenv("FITPROOF_CACHE", str(tmp_path))
    return tmp_path


def test_only_code_that_a_timeline_depends_on_changes_its_key(tmp_path: Path) -> None:
    package = tmp_path / "pipeline"
    shutil.copytree(ROOT / "pipeline", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(package)
    for folder in sorted(path.name for path in package.iterdir() if path.is_dir()):
        with next((package / folder).glob("*.py")).open("a") as file:
            file.write("# edited\n")
        code_digest.cache_clear()
        after = code_digest(package)
        assert (after != before) == (folder in CODE), folder
        before = after
    for name in ("cli.py", "__main__.py", "__init__.py"):
        (package / name).write_text("")
    code_digest.cache_clear()
    assert code_digest(package) == before


def test_the_least_recently_used_files_are_removed_above_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny()
    prepared = experiment.read_corpus()
    files = [trace_file(experiment, CPU, prepared, num_rows, "") for num_rows in range(5)]
    for number, file in enumerate(files[:4]):
        write_trace(file, EMPTY)
        os.utime(file, times=(0, time.time() - 10 * trace_cache.IN_USE_SECONDS + number))
    (folder / "another-file").write_bytes(bytes(10**6))
    find_trace(files[0])
    monkeypatch.setattr(trace_cache, "LIMIT_BYTES", 2 * files[0].stat().st_size)
    write_trace(files[4], EMPTY)
    assert [file.exists() for file in files] == [True, False, False, False, True]
    monkeypatch.setattr(trace_cache, "LIMIT_BYTES", 0)
    write_trace(files[3], EMPTY)
    assert [file.exists() for file in files] == [True, False, False, True, True]  # all used a moment ago
    assert (folder / "another-file").exists()


def test_limits_on_a_cpus_instructions_change_the_key_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, card = tiny(), find_card("t4")
    prepared = experiment.read_corpus()
    before = [trace_file(experiment, each, prepared, 1, "") for each in (CPU, card)]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    limited = [trace_file(experiment, each, prepared, 1, "") for each in (CPU, card)]
    assert limited[0] != before[0] and limited[1] == before[1]
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert trace_file(experiment, CPU, prepared, 1, "") != limited[0]
