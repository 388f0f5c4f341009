"""Replacements for functions that read the values of tensors, which fake tensors do not have."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.simulation.communicators import note_on_communicators

SUPPORTED = "2.9 to 2.15"
"""The versions of torch that pyproject.toml allows."""
RANDOM_STATE_BYTES = 5056
"""Bytes of the CPU generator's state (torch.get_rng_state), which every checkpointed layer saves."""
DOCUMENTS = "find_packed_sequence_indices"
"""transformers' search for several documents in a row, in its module masking_utils."""

OUTLIERS = "if outliers.any():"
"""bitsandbytes' question whether any input of an 8-bit product is beyond its threshold."""
PADDING = ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")
"""Functions of that module that read whether a mask of padding masks anything."""


def replaced(owner: Any, name: str, replacement: Any) -> AbstractContextManager[Any]:
    """Replace a function of torch by another one inside the context.

    Raises:
        InvalidInputError: this version of torch has no such function.

    """
    if not hasattr(owner, name):
        raise InvalidInputError(
            f"memory is predicted with torch {SUPPORTED}, and torch {torch.__version__} has no "
            f"{owner.__name__}.{name}, in whose place another function must run; install a version of torch from "
            f"{SUPPORTED}, or measure: fitproof main"
        )
    return patch.object(owner, name, replacement)


def notes_on(experiments: Iterable[Experiment], hardware: Hardware) -> tuple[str, ...]:
    """Return what a reader of predictions on this hardware needs to know, a sentence each."""
    experiments = list(experiments)
    sentences = [sentence for one in experiments for sentence in one.notes(hardware)]
    sizes = sorted({one.world_size for one in experiments if one.world_size > 1})
    if hardware.kind == "cuda" and sizes:
        sentences.append(
            f"world_size={', '.join(map(str, sizes))}: predicted for one rank, which has a communicator of all ranks, "
            f"and one of each smaller group that it is in. {note_on_communicators('each communicator')}"
        )
    source = find_spec("transformers.masking_utils")
    if source is None or f"def {DOCUMENTS}(" not in Path(str(source.origin)).read_text():
        sentences.append(
            f"transformers {version('transformers')} has no masking_utils.{DOCUMENTS}, in whose place another function "
            "runs while memory is predicted: masks of documents may be missing from the predictions"
        )
    return tuple(dict.fromkeys(sentences))


def masks_of(experiment: Experiment, prepared: Prepared) -> Mapping[str, bool]:
    """Return what is known of masks: whether sequences have several documents, and whether any has padding.

    Where a corpus passes no mask, one that a model of transformers makes hides nothing; own code may make any.
    """
    batch = prepared.train.batch([0])
    is_own = experiment.family == "user_model"
    return {"has_documents": "position_ids" in batch, "has_padding": is_own or "attention_mask" in batch}


@contextmanager
def without_values(**masks: bool) -> Iterator[None]:
    """Replace the functions of a training run that read values or set random generators, and restore them on exit.

    `masks` is what is known of masks.

    Raises:
        InvalidInputError: this version of torch lacks one of them.

    """
    adafactor = import_module("torch.optim._adafactor")
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch, "get_rng_state", lambda: torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8)),
            (torch, "set_rng_state", lambda state: None),
            (torch, "manual_seed", lambda seed: None),
            (torch.utils, "swap_tensors", _take_data),
            (torch.amp.GradScaler, "_maybe_opt_step", _step_without_asking),
            (adafactor, "_single_tensor_adafactor", _with_ones_for_values(adafactor)),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        stack.enter_context(masks_known(**masks))
        yield


@contextmanager
def masks_known(*, has_documents: bool = False, has_padding: bool = True) -> Iterator[None]:
    """Replace transformers' searches for documents and for padding, whose answers are of values, inside this context.

    `has_documents` and `has_padding` say what they find.
    """
    from transformers import masking_utils

    with ExitStack() as stack:
        if hasattr(masking_utils, DOCUMENTS):  # else notes_on() says so
            stack.enter_context(patch.object(masking_utils, DOCUMENTS, _documents_found(masking_utils, has_documents)))
        for name in PADDING:
            if hasattr(masking_utils, name):
                found = _padding_found(getattr(masking_utils, name), has_padding)
                stack.enter_context(patch.object(masking_utils, name, found))
        yield


def lines_of_documents() -> set[str]:
    """Return the places, as file:line, of transformers' search for several documents in a row."""
    from transformers import masking_utils

    function = getattr(masking_utils, DOCUMENTS, None)
    if function is None:
        return set()
    lines, first = inspect.getsourcelines(function)
    return {f"{inspect.getsourcefile(function)}:{number}" for number in range(first, first + len(lines))}


def lines_of_outliers() -> set[str]:
    """Return the places, as file:line, where bitsandbytes reads whether 8-bit inputs have outliers: a card has none."""
    spec = find_spec("bitsandbytes")
    file = Path(str(spec.origin)).parent / "backends" / "cuda" / "ops.py" if spec else None
    if file is None or not file.exists():
        return set()
    return {f"{file}:{number}" for number, line in enumerate(file.read_text().splitlines(), 1) if OUTLIERS in line}


def _step_without_asking(_: Any, optimizer: Optimizer, __: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the step of an optimizer that cannot itself skip one with infinite gradients."""
    return optimizer.step(*args, **kwargs)


def _take_data(parameter: Tensor, converted: Tensor) -> None:
    """Convert a module's parameter in place, as on real tensors: fake ones that are recorded cannot be swapped."""
    parameter.data = converted.data


def _with_ones_for_values(module: Any) -> Any:
    """Return a replacement for Adafactor's update in which each value that it reads is 1; memory depends on none."""
    update = getattr(module, "_single_tensor_adafactor", None)  # replaced() refuses a torch without it

    def update_with_ones(*args: Any, **kwargs: Any) -> None:
        assert update is not None
        with patch.object(Tensor, "item", lambda _: 1.0):
            update(*args, **kwargs)

    return update_with_ones


def _padding_found(may_leave_out: Any, has_padding: bool) -> Any:
    """Return a replacement for transformers' question whether a mask can be left out, which reads if it has padding."""

    def ask(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if padding_mask is not None:
            padding_mask.all()  # it allocates memory
            if has_padding:
                return False
        return may_leave_out(None, *args, **kwargs)

    return ask


def _documents_found(module: Any, has_documents: bool) -> Any:
    """Return a replacement for transformers' search for documents in a row, which reads whether there are several.

    Without, it returns None, so that no mask is made. That is also what it finds in a micro-batch whose sequences all
    have one document that fills them: predicted is one with a mask.
    """
    find = getattr(module, DOCUMENTS)

    def search(position_ids: Tensor) -> Any:
        if not has_documents:
            find(position_ids)  # it allocates memory
            return None
        with patch.object(module, "is_tracing", lambda *_: True):  # else it asks what a card without values cannot say
            documents = find(position_ids)
        (documents[:, -1] == 0).all()  # that question allocates memory
        return documents

    return search
