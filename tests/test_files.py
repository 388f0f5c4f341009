"""Files that are written at once by several threads, and by containers whose processes have the same id."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.base.files import write_atomically


def test_threads_write_one_file_and_none_loses_it(tmp_path: Path) -> None:
    """The same process id, as two containers may have it."""
    file = tmp_path / "new" / "file"
    contents = [bytes([65 + number]) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(lambda content: write_atomically(file, content), contents))  # raises what a thread raised
            assert file.read_bytes() in contents
    assert [one.name for one in file.parent.iterdir()] == ["file"]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "folder", b"x")  # a file cannot replace a folder
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_a_file_can_be_read_by_whom_the_umask_lets_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
