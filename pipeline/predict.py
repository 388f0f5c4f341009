"""An Experiment on fake tensors -> Prediction: how much memory it needs, before anything runs."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipeline.contracts import Hardware, InvalidInputError, Prepared
from pipeline.experiment import Experiment
from pipeline.memory.anatomy import Anatomy, at_peak
from pipeline.memory.lifetimes import Timeline
from pipeline.profile import record_lifetimes
from pipeline.simulation.batches import RepeatedRow
from pipeline.simulation.target import simulated


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a run of an Experiment on a device will need; None where such a device does not count it."""

    target: Hardware
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    """Reserved bytes and the context."""
    anatomy: Anatomy
    """The peak taken apart, before the allocator rounds: its phase, categories, modules and largest tensors."""
    phase_bytes: Mapping[str, int]
    """Greatest number of bytes alive in each phase."""


def predict(experiment: Experiment, target: Hardware, prepared: Prepared | None = None) -> Prediction:
    """Take two optimizer steps of `experiment` without numbers, as if on `target`, and return what they would need.

    The corpus is read unless it is given; one example of it suffices, however large the batch.

    Raises:
        InvalidInputError: the target cannot run it, or its work depends on the values of tensors.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(f"{reason}; choose another value")
    timeline = trace(experiment, target, prepared or experiment.read_corpus())
    return Prediction(
        target=target,
        peak_allocated_bytes=max(timeline.allocated_bytes()),
        peak_reserved_bytes=None,
        peak_device_bytes=None,
        anatomy=at_peak(timeline),
        phase_bytes=_by_phase(timeline),
    )


def trace(experiment: Experiment, target: Hardware, prepared: Prepared) -> Timeline:
    """Return what would live when, as `target` would hold it.

    Raises:
        InvalidInputError: the work depends on the values of tensors.

    """
    rows = RepeatedRow(prepared.train, torch.device("cpu"))
    try:
        with simulated(target):
            return record_lifetimes(experiment, replace(prepared, train=rows))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidInputError(
            f"memory is predicted without numbers, and {_who_asked(error)} asks for one ({error.func}); "
            "measure this configuration instead: python -m pipeline main"
        ) from error


def _who_asked(error: BaseException) -> str:
    """Return the function outside of torch that asked for a tensor's value, and its line."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and f.name != "__torch_dispatch__"
    ]
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"


def _by_phase(timeline: Timeline) -> dict[str, int]:
    allocated = timeline.allocated_bytes()
    ends = [span.begin for span in timeline.spans[1:]] + [len(allocated)]
    greatest: dict[str, int] = {}
    for span, end in zip(timeline.spans, ends, strict=True):
        greatest[span.phase] = max([greatest.get(span.phase, 0), *allocated[span.begin : end]])
    return greatest
