"""Recordings: an Experiment's timeline on fake tensors of a device that this machine need not have."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import device
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipeline.base.contracts import Hardware, Prepared, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.user_functions import is_function_name, user_code_error
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Timeline
from pipeline.prediction.eight_bit import quantized_states
from pipeline.prediction.extrapolate_batch import with_sorted_releases
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.fake_card import CARD, HOST, move_to_card
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.four_bit import quantize
from pipeline.prediction.workspaces import WorkspaceTable
from pipeline.training.profiler import record_lifetimes
from pipeline.training.step import on_host

THIS_FOLDER = Path(__file__).parent
"""The folder of the replacements for torch's functions, which are left out of error messages."""


def record(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline:
    """Record all of two optimizer steps with `num_rows` sequences each.

    Raises:
        InvalidInputError: the run reads the values of tensors, or the user's own model raises an error.

    """
    on_fake_device = experiment.with_random_weights(str(CARD))
    rows = RepeatedRow(prepared.train, HOST if target.capability else device("cpu"), num_rows)
    build = _from_host if target.capability else _on_cpu
    try:
        has_documents = "position_ids" in prepared.train.batch([0])
        with (
            _threads(experiment.num_threads),
            quantized_states(experiment, target),
            simulated(target, has_documents=has_documents) as mode,
        ):
            example, inside_of = replace(prepared, train=rows), WorkspaceTable(target)
            timeline = record_lifetimes(on_fake_device, example, build=build, inside_of=inside_of, run=mode.run)
        return with_sorted_releases(timeline)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidInputError(_value_was_read(error)) from error
    except Exception as error:
        if is_function_name(experiment.settings.model):
            raise user_code_error(experiment.settings.model, error) from error
        raise


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Let torch compute with so many threads, on which the memory of some of a CPU's operators depends."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _from_host(experiment: Experiment, prepared: Prepared) -> Trainable:
    with HOST:
        trainable = on_host(experiment, prepared)
    move_to_card(trainable.module)
    return trainable


def _on_cpu(experiment: Experiment, prepared: Prepared) -> Trainable:
    trainable = on_host(experiment, prepared)
    quantize(trainable.module)
    return trainable


def _value_was_read(error: DataDependentOutputException | DynamicOutputShapeException) -> str:
    """Return the message that names the function, outside of torch and of this folder, that read a tensor's value."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and frame.name[:2] != "__" and Path(frame.filename).parent != THIS_FOLDER
    ]
    place = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
    remedy = "measure this configuration instead: fitproof main"
    if "/transformers/models/" in frames[-1].filename:
        remedy += (
            "; if it is a mixture of experts, set experts_implementation to grouped_mm in its config.json, since eager "
            "routing allocates memory that depends on values"
        )
    problem = f"memory is predicted on fake tensors, which have no values, and {place} reads a value"
    return f"{problem} ({error.func}); {remedy}"
