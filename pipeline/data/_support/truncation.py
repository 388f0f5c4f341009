"""The lengths of a corpus's documents, and what is lost when they are cut at each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.data._support.token_store import TokenStore

PERCENTILES = (50, 75, 90, 95, 99, 100)
MOST_BINS = 40


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """The number of documents that have `start` to `end` tokens, both included."""

    start: int
    end: int
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """What cutting every document at `length` tokens loses."""

    length: int
    whole_percent: float
    """Percentage of documents that are no longer and not left out: they lose nothing."""
    lost_tokens_percent: float
    """Percentage of the tokens that are cut off, or in documents that are left out; the next is that of targets."""
    lost_targets_percent: float
    num_left_out: int
    """Documents without a target in their first `length` tokens."""
    peak_bytes: int | None = None
    """Predicted peak of a run with such sequences, if it was predicted."""


def length_bins(store: TokenStore) -> tuple[LengthBin, ...]:
    """Return the histogram of the documents' lengths, in at most MOST_BINS bins of one width."""
    if not len(store.lengths):
        return ()
    shortest, longest = int(store.lengths.min()), int(store.lengths.max())
    width = -(-(longest - shortest + 1) // MOST_BINS)
    counts = np.bincount((store.lengths - shortest) // width)
    starts = range(shortest, longest + 1, width)
    return tuple(
        LengthBin(start=start, end=start + width - 1, num_documents=int(count))
        for start, count in zip(starts, counts, strict=True)
    )


def truncations(store: TokenStore, lengths: Sequence[int] = ()) -> tuple[Truncation, ...]:
    """Return the truncation at each of PERCENTILES of the documents' lengths, and at other `lengths`, by length."""
    if not len(store.lengths):
        return ()
    percentiles = np.percentile(store.lengths, PERCENTILES, method="higher")
    return tuple(_truncation(store, length) for length in sorted({*map(int, percentiles), *lengths}))


def _truncation(store: TokenStore, length: int) -> Truncation:
    starts, is_left_out = store.offsets[:-1], store.last_targets(length) <= store.offsets[:-1]
    ends = np.where(is_left_out, starts, np.minimum(store.offsets[1:], starts + length))
    return Truncation(
        length=length,
        whole_percent=100 * float(((store.lengths <= length) & ~is_left_out).mean()),
        lost_tokens_percent=_percent_lost(int((ends - starts).sum()), len(store.tokens)),
        lost_targets_percent=_percent_lost(_num_targets(store, ends), _num_targets(store, store.offsets[1:])),
        num_left_out=int(is_left_out.sum()),
    )


def _num_targets(store: TokenStore, ends_D: np.ndarray) -> int:
    """Return the targets of documents that are cut at these tokens: no first token of a document is one."""
    return store.num_targets(np.minimum(store.offsets[:-1] + 1, ends_D), ends_D)


def _percent_lost(kept: int, total: int) -> float:
    """Return the percentage of `total` that is not kept; nothing can be lost of nothing."""
    return 100 * (1 - kept / total) if total else 0.0
