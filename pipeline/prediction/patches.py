"""What asks for numbers that fake tensors do not have: answered otherwise for a while, restored whatever happens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

RANDOM_STATE_BYTES = 5056
"""Of the CPU's random number generator (torch.get_rng_state), which every checkpoint keeps."""


@contextmanager
def without_numbers(*, counts_host_memory: bool) -> Iterator[None]:
    """Answer what a training run asks of its numbers, and leave the process's random generators alone.

    `counts_host_memory` says whether the generator's state, which lives on the CPU, belongs to the memory in question.
    """
    from transformers import masking_utils  # takes a second, which predictions from the cache need not wait for

    state_bytes = RANDOM_STATE_BYTES if counts_host_memory else 0
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch, "get_rng_state", lambda: torch.empty(state_bytes, dtype=torch.uint8)),
            (torch, "set_rng_state", lambda state: None),
            (torch, "manual_seed", lambda seed: None),
            (masking_utils, "find_packed_sequence_indices", _one_sequence_a_row(masking_utils)),
        ):
            if hasattr(owner, name):  # not every version of transformers looks for sequences within a row
                stack.enter_context(patch.object(owner, name, replacement))
        yield


def _one_sequence_a_row(module: Any) -> Any:
    """Return transformers' search for sequences within a row, with the answer it finds when no positions are given.

    It looks whether the positions that the model has counted itself ever jump: they never do, and then no mask is made.
    """
    find = getattr(module, "find_packed_sequence_indices", lambda positions: None)

    def search_without_finding(position_ids: Tensor) -> None:
        find(position_ids)  # for the sake of the memory that it takes

    return search_without_finding
