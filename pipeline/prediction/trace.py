"""An Experiment -> its timeline on a device that this machine need not have.

It is recorded on fake tensors, cached on disk, and extrapolated from other micro-batch sizes and from fewer layers
where that is exact.
"""

import traceback
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from torch import device
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from pipeline.base.contracts import Hardware, Prepared, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.base.user_functions import is_function_name, user_code_error
from pipeline.config.experiment import Experiment
from pipeline.memory.timeline import Lifetime, Timeline
from pipeline.prediction.extrapolate_batch import Growth, growth_of, same_memory, with_sorted_releases
from pipeline.prediction.extrapolate_depth import Layers, fewest_layers, repetition_of, with_more_layers
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.fake_card import CARD, HOST, move_to_card
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.trace_cache import IRRELEVANT, find_trace, read_trace, trace_file, write_trace
from pipeline.prediction.workspaces import WorkspaceTable
from pipeline.training.profiler import record_lifetimes
from pipeline.training.step import on_device

STEADY_STEPS = 2
"""Micro-batches of an optimizer step that are recorded; further ones repeat the second."""
LARGEST_SHARE = 0.8
"""Share of a model's layers that two shallow models may have together, to be recorded in its place."""
RECORDED_SIZES = (2, 4, 8)
"""Micro-batch sizes from which others (but 1) are extrapolated: from the first two, if they predict the third."""
LARGEST_GROWTH_BYTES = 1024
"""Bytes that a further micro-batch may add in a steady step: the value of its loss."""
SPLIT = ("micro_batch_size", "accumulation_steps", "effective_batch_size")
"""Settings of how a batch is split."""
THIS_FOLDER = Path(__file__).parent
"""The folder of the replacements for torch's functions, which are left out of error messages."""


def trace(experiment: Experiment, target: Hardware, prepared: Prepared) -> Timeline:
    """Return the timeline of two optimizer steps on `target`, from the cache if possible.

    Of more than two micro-batches in a step only two are recorded, if the second leaves no memory behind.

    Raises:
        InvalidInputError: the run reads the values of tensors, or the cache folder cannot be written.

    """
    settings, num_rows = experiment.settings, experiment.effective_batch_size
    size = experiment.micro_batch_size
    if num_rows > STEADY_STEPS * size:
        fewer = {"accumulation_steps": STEADY_STEPS, "effective_batch_size": STEADY_STEPS * size}
        short = Experiment(settings.model_copy(update=fewer))
        on_host = target.kind != "cpu"  # the batch waits in host memory, which is not counted
        timeline = _cached(short, target, prepared, STEADY_STEPS * size if on_host else num_rows)
        if is_steady(timeline):
            return timeline
    return _cached(experiment, target, prepared, num_rows)


def others_need(experiment: Experiment) -> bool:
    """Whether timelines of other micro-batch sizes can be extrapolated from this one."""
    return experiment.micro_batch_size in RECORDED_SIZES


def family_of(experiment: Experiment) -> str:
    """Return what the experiments have in common whose timelines are recorded once, or extrapolated from one another.

    They differ in how their batch is split, or in a setting that changes no storage.
    """
    names = (*SPLIT, *IRRELEVANT.split())
    left_out = {name: None for name in names if name in type(experiment.settings).model_fields}
    return repr(experiment.settings.model_copy(update=left_out))


def is_steady(timeline: Timeline) -> bool:
    """Whether the second micro-batch of the last optimizer step leaves the storages that it found, and hardly more."""
    step = max(span.step for span in timeline.spans if span.phase == "backward")
    ends = [after.begin for span, after in pairwise(timeline.spans) if (span.step, span.phase) == (step, "backward")]
    if len(ends) != STEADY_STEPS:
        return False
    found, left = (Counter(map(_form, timeline.alive(end - 1))) for end in ends)
    return found <= left and sum(num_bytes for num_bytes, *_ in (left - found).elements()) <= LARGEST_GROWTH_BYTES


def _form(lifetime: Lifetime) -> tuple[int, object, object, object, object]:
    return lifetime.num_bytes, lifetime.dtype, lifetime.operator, lifetime.module, lifetime.category


def _cached(
    experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int, sizes: tuple[int, ...] = RECORDED_SIZES
) -> Timeline:
    """Return the timeline of optimizer steps with `num_rows` sequences each, from the cache if possible.

    It is extrapolated from the first two of the micro-batch sizes `sizes`, if that predicts the third. With two sizes,
    it is verified otherwise: by extrapolation of another timeline to this one.
    """
    if experiment.settings.model not in experiment.model.names:
        return record(experiment, target, prepared, num_rows)  # its configuration files may change
    file = trace_file(experiment, target, prepared, num_rows)
    cached = find_trace(file)
    if cached is not None:
        return cached
    timeline = _from_few_layers(experiment, target, prepared, num_rows) or _from_other_sizes(
        experiment, target, prepared, num_rows, sizes
    )
    if timeline is not None:
        return timeline
    timeline = record(experiment, target, prepared, num_rows)
    write_trace(file, timeline)
    return timeline


def _from_few_layers(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline | None:
    """Return the timeline extrapolated from those of the same model with few layers, if it is deep.

    The first of the two is extrapolated to the second, and must be it.
    """
    num_layers, period, reach = experiment.description.num_layers, experiment.layer_period, experiment.layer_reach
    if num_layers is None or period is None:
        return None
    fewest = fewest_layers(num_layers, period, reach)
    if 2 * fewest + period > LARGEST_SHARE * num_layers:
        return None
    layers = Layers(fewest, period, num_layers - fewest, reach)
    shallow = _cached(experiment.with_layers(fewest), target, prepared, num_rows)
    if repetition_of(shallow, layers) is None:
        return None
    deeper = _cached(experiment.with_layers(fewest + period), target, prepared, num_rows, sizes=RECORDED_SIZES[:2])
    return with_more_layers(shallow, deeper, layers)


def _from_other_sizes(
    experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int, sizes: tuple[int, ...]
) -> Timeline | None:
    """Return the timeline extrapolated from those of other micro-batch sizes, if they are in the cache.

    Where the layers save storages that reach a threshold between them and this size, twice the sizes are tried.
    """
    size = experiment.micro_batch_size
    if size <= sizes[0]:
        return None  # one sequence may take other code paths: an axis of one element is always contiguous
    thresholds = [threshold for technique in experiment.techniques for threshold in technique.size_thresholds]
    growth = _growth_between(sizes, experiment, target, prepared, num_rows)
    if growth is not None and not growth.crosses(size, thresholds):
        return growth.extrapolated(size, target)
    doubled = tuple(2 * known for known in sizes)
    return _from_other_sizes(experiment, target, prepared, num_rows, doubled) if thresholds else None


def _growth_between(
    sizes: tuple[int, ...], experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int
) -> Growth | None:
    """Return the growth between the first two of these micro-batch sizes, if all are in the cache and it is linear."""
    if len({_chunks(experiment, size) for size in (*sizes, experiment.micro_batch_size)}) != 1:
        return None
    files = tuple(_file_of_size(size, experiment, target, prepared, num_rows) for size in sizes)
    return _verified_growth(sizes, files, target) if all(find_trace(file) is not None for file in files) else None


def _chunks(experiment: Experiment, size: int) -> tuple[int | None, ...]:
    """Return the number of chunks in which each technique processes a micro-batch of this size."""
    num_tokens, width = size * experiment.settings.sequence_length, experiment.description.width
    return tuple(technique.num_chunks(num_tokens, width) for technique in experiment.techniques)


@lru_cache(maxsize=8)
def _verified_growth(sizes: tuple[int, ...], files: tuple[Path, ...], target: Hardware) -> Growth | None:
    """Return the growth between the timelines of the first two sizes, if it predicts those of the others."""
    first, second, *others = zip(sizes, map(read_trace, files), strict=True)
    growth = growth_of(first, second)
    if growth is None or any(not same_memory(growth.extrapolated(size, target), one) for size, one in others):
        return None
    return growth


def _file_of_size(size: int, experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Path:
    """Return the file of the same experiment at another micro-batch size.

    On a CPU the whole batch is alive during all micro-batches, so it stays the same; elsewhere it grows.
    """
    passes = experiment.effective_batch_size // experiment.micro_batch_size
    changes = {"micro_batch_size": size, "effective_batch_size": passes * size}
    other = Experiment(experiment.settings.model_copy(update=changes))
    keeps_batch = target.kind == "cpu" and passes > 1
    return trace_file(other, target, prepared, num_rows if keeps_batch else passes * size)


def record(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline:
    """Record all of two optimizer steps with `num_rows` sequences each.

    Raises:
        InvalidInputError: the run reads the values of tensors, or the user's own model raises an error.

    """
    on_fake_device = experiment.with_random_weights(str(CARD))
    rows = RepeatedRow(prepared.train, HOST if target.capability else device("cpu"), num_rows)
    build = _from_host if target.capability else on_device
    try:
        with simulated(target) as mode:
            example, inside_of = replace(prepared, train=rows), WorkspaceTable(target)
            timeline = record_lifetimes(on_fake_device, example, build=build, inside_of=inside_of, run=mode.run)
        return with_sorted_releases(timeline)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidInputError(_value_was_read(error)) from error
    except Exception as error:
        if is_function_name(experiment.settings.model):
            raise user_code_error(experiment.settings.model, error) from error
        raise


def _from_host(experiment: Experiment, prepared: Prepared) -> Trainable:
    with HOST:
        trainable = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    move_to_card(trainable.module)
    return trainable


def _value_was_read(error: DataDependentOutputException | DynamicOutputShapeException) -> str:
    """Return the message that names the function, outside of torch and of this folder, that read a tensor's value."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and frame.name[:2] != "__" and Path(frame.filename).parent != THIS_FOLDER
    ]
    place = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
    remedy = "measure this configuration instead: headroom main"
    if "/transformers/models/" in frames[-1].filename:
        remedy += (
            "; if it is a mixture of experts, set experts_implementation to grouped_mm in its config.json, since eager "
            "routing allocates memory that depends on values"
        )
    problem = f"memory is predicted on fake tensors, which have no values, and {place} reads a value"
    return f"{problem} ({error.func}); {remedy}"
