"""Token stores: tokenized documents on disk, read by mapping them into memory and written document by document."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

TYPES = {"tokens": np.dtype(np.int32), "targets": np.dtype(np.bool_)}
"""Of the values in the files of a store."""
TOKENS_AT_ONCE = 2**22
"""Of a store, for what needs eight bytes for each."""


@dataclass(frozen=True)
class TokenStore:
    """Tokenized documents on disk: their concatenated tokens, and the index at which each document starts."""

    tokens: np.ndarray
    """int32, memory-mapped."""
    offsets: np.ndarray
    """int64, the start of each document, and the number of tokens as the last element."""
    is_target: np.ndarray | None = None
    """bool, memory-mapped: whether each token is a target of the loss; None: all are."""

    @classmethod
    def open(cls, folder: Path, name: str) -> "TokenStore":
        """Memory-map the store `name` in `folder`."""
        targets = folder / f"{name}.targets.npy"
        return cls(
            np.load(folder / f"{name}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{name}.offsets.npy"),
            np.load(targets, mmap_mode="r") if targets.exists() else None,
        )

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document."""
        lengths: np.ndarray = np.diff(self.offsets)
        return lengths

    def last_targets(self, length: int) -> np.ndarray:
        """Return the index of each document's last target among its first `length` tokens.

        It is not after the document's first token if there is none that has another token before it.
        """
        last: np.ndarray = np.minimum(self.offsets[1:], self.offsets[:-1] + length) - 1
        if self.is_target is None:
            return last
        found = []
        for start, end in self._parts():
            first = int(self.offsets[start])
            targets = np.concatenate([[-1], first + np.flatnonzero(self.is_target[first : self.offsets[end]])])
            found.append(targets[np.searchsorted(targets, last[start:end], side="right") - 1])
        return np.concatenate(found) if found else last

    def num_targets(self, starts_D: np.ndarray, ends_D: np.ndarray) -> int:
        """Return how many targets there are from each document's index in `starts_D` to before that in `ends_D`."""
        if self.is_target is None:
            return int((ends_D - starts_D).sum())
        total = 0
        for start, end in self._parts():
            first = int(self.offsets[start])
            num_before = np.concatenate([[0], np.cumsum(self.is_target[first : self.offsets[end]])])
            total += int((num_before[ends_D[start:end] - first] - num_before[starts_D[start:end] - first]).sum())
        return total

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield the first document, and the one after the last, of parts of about TOKENS_AT_ONCE tokens."""
        start, count = 0, len(self.offsets) - 1
        while start < count:
            end = int(np.searchsorted(self.offsets, self.offsets[start] + TOKENS_AT_ONCE))
            end = min(max(end, start + 1), count)
            yield start, end
            start = end


class TokenWriter:
    """Writes a store document by document; all that it keeps in memory is where each of them begins."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._files: dict[str, IO[bytes]] = {}
        self._lengths: list[np.ndarray] = []

    def __enter__(self) -> "TokenWriter":
        return self

    def add(self, tokens: np.ndarray, lengths: np.ndarray, is_target: np.ndarray | None) -> None:
        """Write documents: their tokens, of all one after another, and likewise whether each is a target."""
        self._lengths.append(lengths)
        self._append("tokens", tokens)
        if is_target is not None:
            self._append("targets", is_target)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Complete the files, unless there was an error."""
        if kind is None:
            if "tokens" not in self._files:
                self._append("tokens", np.zeros(0, dtype=np.int32))
            offsets = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths]))
            np.save(self._folder / f"{self._name}.offsets.npy", offsets)
        for part, file in self._files.items():
            if kind is None:
                count = (file.tell() - self._header(file, part, 0)) // TYPES[part].itemsize
                self._header(file, part, count)
            file.close()

    def _append(self, part: str, values: np.ndarray) -> None:
        if part not in self._files:
            self._files[part] = (self._folder / f"{self._name}.{part}.npy").open("wb")
            self._header(self._files[part], part, 0)
        self._files[part].write(np.ascontiguousarray(values, dtype=TYPES[part]).tobytes())

    @staticmethod
    def _header(file: IO[bytes], part: str, count: int) -> int:
        """Write the header of an array of so many values, which is as long for any number; return its length."""
        end = file.tell()
        file.seek(0)
        about = {"descr": np.lib.format.dtype_to_descr(TYPES[part]), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, about)
        length = file.tell()
        file.seek(max(end, length))
        return length
