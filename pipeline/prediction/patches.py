"""Replacements for functions that read the values of tensors, which fake tensors do not have."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.prediction.fake_card import HOST

RANDOM_STATE_BYTES = 5056
"""Bytes of the CPU generator's state (torch.get_rng_state), which every checkpointed layer saves."""


@contextmanager
def clipping_in_lists() -> Iterator[None]:
    """Clip gradients by operators on lists, as on CUDA, not by two for each gradient."""
    with patch.object(import_module("torch.nn.utils.clip_grad"), "_has_foreach_support", lambda *_, **__: True):
        yield


@contextmanager
def without_values(*, counts_host_memory: bool, has_documents: bool) -> Iterator[None]:
    """Replace the functions of a training run that read values or set random generators, and restore them on exit.

    `counts_host_memory` says whether the state of the random generator, which is on the CPU, is counted, and
    `has_documents` whether sequences have several documents, which attention keeps apart.
    """
    from transformers import masking_utils  # takes a second, which cached predictions do not need

    adafactor = import_module("torch.optim._adafactor")
    host = nullcontext() if counts_host_memory else HOST
    state_bytes = RANDOM_STATE_BYTES if counts_host_memory else 0
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch, "get_rng_state", lambda: torch.empty(state_bytes, dtype=torch.uint8)),
            (torch, "set_rng_state", lambda state: None),
            (torch, "manual_seed", lambda seed: None),
            (torch.utils, "swap_tensors", _take_data),
            (torch.amp.GradScaler, "_maybe_opt_step", _step_without_asking),
            (adafactor, "_single_tensor_adafactor", _with_ones_for_values(adafactor)),
            (adafactor.Adafactor, "_init_group", _with_counts_on(host, adafactor)),
            (masking_utils, "find_packed_sequence_indices", _documents_found(masking_utils, has_documents)),
        ):
            if hasattr(owner, name):  # not in every version of transformers
                stack.enter_context(patch.object(owner, name, replacement))
        yield


def _step_without_asking(_: Any, optimizer: Optimizer, __: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the step of an optimizer that cannot itself skip one with infinite gradients."""
    return optimizer.step(*args, **kwargs)


def _take_data(parameter: Tensor, converted: Tensor) -> None:
    """Convert a module's parameter in place, as on real tensors: fake ones that are recorded cannot be swapped."""
    parameter.data = converted.data


def _with_ones_for_values(module: Any) -> Any:
    """Return a replacement for Adafactor's update in which each value that it reads is 1; memory depends on none."""
    update = module._single_tensor_adafactor

    def update_with_ones(*args: Any, **kwargs: Any) -> None:
        with patch.object(Tensor, "item", lambda _: 1.0):
            update(*args, **kwargs)

    return update_with_ones


def _with_counts_on(host: AbstractContextManager[Any], module: Any) -> Any:
    """Return a replacement for the start of Adafactor's step that keeps the numbers of steps where torch does."""
    start = module.Adafactor._init_group

    def start_with_counts_on_host(*args: Any, **kwargs: Any) -> Any:
        with host:
            return start(*args, **kwargs)

    return start_with_counts_on_host


def _documents_found(module: Any, has_documents: bool) -> Any:
    """Return a replacement for transformers' search for documents in a row, which reads whether there are several.

    Without, it returns None, so that no mask is made. That is also what it finds in a micro-batch whose sequences all
    have one document that fills them: predicted is one with a mask.
    """
    find = getattr(module, "find_packed_sequence_indices", lambda positions: None)

    def search(position_ids: Tensor) -> Any:
        documents = find(position_ids)  # it allocates memory
        return documents if has_documents else None

    return search
