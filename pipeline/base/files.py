"""The cache folder, atomic writes, digests, and the last lines of an output."""

import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pipeline.base.errors import InvalidInputError

LAST_LINES = 5
"""Last lines of what a process printed that are kept when it fails."""


def cache_folder() -> Path:
    """Return the folder of cached files: $FITPROOF_CACHE, or `fitproof` in the user's cache folder.

    Raises:
        InvalidInputError: it cannot be created or written.

    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _writable(Path(os.environ.get("FITPROOF_CACHE") or Path(base) / "fitproof"))


@cache
def _writable(folder: Path) -> Path:
    """Return the folder, which is created and checked once in a process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InvalidInputError(
            f"the cache folder must be writable, and {folder} is not ({error.strerror}); set FITPROOF_CACHE to another"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file by renaming a temporary one, so that other threads and processes see all of it or nothing.

    Raises:
        OSError: it cannot be written.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")  # of this call alone, with the usual permissions
    try:
        work.write_bytes(content)
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def last_lines(log: Path) -> list[str]:
    """Return the last LAST_LINES of an output that are not blank; none if there is no such file."""
    try:
        return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
    except FileNotFoundError:
        return []


def digest_of(parts: Iterable[bytes | str]) -> str:
    """Return the SHA-256 digest of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
