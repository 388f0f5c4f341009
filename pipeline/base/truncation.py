"""The lengths of a corpus's documents, and what is lost when they are cut at each of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.base.sequences import TokenStore

PERCENTILES = (50, 75, 90, 95, 99, 100)


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """What cutting every document at `length` tokens loses."""

    length: int
    whole_percent: float
    """Percentage of documents that are no longer, and lose nothing."""
    lost_tokens_percent: float
    lost_targets_percent: float
    num_left_out: int
    """Documents without a target in their first `length` tokens."""
    peak_bytes: int | None = None
    """Predicted peak of a run with such sequences, if it was predicted."""


def truncations(store: TokenStore, lengths: Sequence[int] = ()) -> tuple[Truncation, ...]:
    """Return the truncation at each of PERCENTILES of the documents' lengths, and at other `lengths`, by length."""
    if not len(store.lengths):
        return ()
    percentiles = np.percentile(store.lengths, PERCENTILES, method="higher")
    return tuple(_truncation(store, length) for length in sorted({*map(int, percentiles), *lengths}))


def _truncation(store: TokenStore, length: int) -> Truncation:
    starts, ends = store.offsets[:-1], np.minimum(store.offsets[1:], store.offsets[:-1] + length)
    kept_tokens = int((ends - starts).sum())
    lost_tokens_percent = 100 * (1 - kept_tokens / len(store.tokens))
    lost_targets_percent = lost_tokens_percent
    if store.is_target is not None:
        num_before = np.concatenate([[0], np.cumsum(store.is_target)])  # targets before each token
        kept_targets = int((num_before[ends] - num_before[starts]).sum())
        lost_targets_percent = 100 * (1 - kept_targets / num_before[-1])
    return Truncation(
        length=length,
        whole_percent=100 * float((store.lengths <= length).mean()),
        lost_tokens_percent=lost_tokens_percent,
        lost_targets_percent=float(lost_targets_percent),
        num_left_out=int((store.last_targets(length) <= starts).sum()),
    )
