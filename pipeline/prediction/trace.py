"""An Experiment on fake tensors -> what would live when, on a device that need not be here; kept on disk."""

import math
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
from pipeline.prediction.extrapolate_batch import Growth, Known, growth_of, in_order, same_memory
from pipeline.prediction.extrapolate_depth import extrapolate_depth
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.fake_card import CARD, HOST, move_to_card
from pipeline.prediction.fake_device import simulated
from pipeline.prediction.trace_cache import read_trace, trace_file, write_trace
from pipeline.prediction.workspaces import WorkspaceTable
from pipeline.training.profiler import record_lifetimes
from pipeline.training.step import on_device

STEADY_STEPS = 2
"""Micro-batches of an optimizer step after which all further ones are alike."""
KNOWN_SIZES = (2, 4, 8)
"""Micro-batch sizes that tell all others but 1, once they are in the cache: two do, if they are right of the third."""
LARGEST_GROWTH_BYTES = 1024
"""What a further micro-batch may leave behind in a steady step: the value of its loss."""
LARGEST_SHARE = 0.8
"""Of a model's layers: what the shallower models may have together, if they are to be run in its place."""
SIMULATION = Path(__file__).parent
"""The folder of what stands in for torch: no function there asks for a value of its own accord."""


def trace(experiment: Experiment, target: Hardware, prepared: Prepared) -> Timeline:
    """Return what would live when over two optimizer steps, as `target` would hold it; from the cache if it can be.

    Of many micro-batches a step only the first two are run, if they show that the rest is alike.

    Raises:
        InvalidInputError: the work depends on the values of tensors, or the cache folder cannot be written.

    """
    settings, num_rows = experiment.settings, experiment.effective_batch_size
    size = experiment.micro_batch_size
    if num_rows > STEADY_STEPS * size:
        fewer = {"accumulation_steps": STEADY_STEPS, "effective_batch_size": STEADY_STEPS * size}
        short = Experiment(settings.model_copy(update=fewer))
        on_host = target.kind != "cpu"  # where nobody counts how long a batch waits there
        timeline = _kept(short, target, prepared, STEADY_STEPS * size if on_host else num_rows)
        if is_steady(timeline):
            return timeline
    return _kept(experiment, target, prepared, num_rows)


def turn(experiment: Experiment) -> int:
    """Return when to take `experiment` among others: sooner where its timeline helps to tell those of other sizes."""
    size = experiment.micro_batch_size
    return 0 if size == KNOWN_SIZES[0] else 1 if size in KNOWN_SIZES else 2


def is_steady(timeline: Timeline) -> bool:
    """Whether the second micro-batch of the last optimizer step leaves what it found: then a third one is like it."""
    step = max(span.step for span in timeline.spans if span.phase == "backward")
    ends = [after.begin for span, after in pairwise(timeline.spans) if (span.step, span.phase) == (step, "backward")]
    if len(ends) != STEADY_STEPS:
        return False
    found, left = (Counter(map(_what, timeline.alive(end - 1))) for end in ends)
    return found <= left and sum(num_bytes for num_bytes, *_ in (left - found).elements()) <= LARGEST_GROWTH_BYTES


def _what(life: Lifetime) -> tuple[int, object, object, object, object]:
    return life.num_bytes, life.dtype, life.operator, life.module, life.category


def _kept(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline:
    """Return the timeline of an optimizer step whose batch has `num_rows` rows, from the cache after the first time."""
    if experiment.settings.model not in experiment.model.names:
        return record(experiment, target, prepared, num_rows)  # its configuration is in files that may change
    file = trace_file(experiment, target, prepared, num_rows)
    if file.exists():
        return read_trace(file)
    extrapolated = _extrapolated(experiment, target, prepared, num_rows)
    if extrapolated is not None:
        return extrapolated
    timeline = _from_few_layers(experiment, target, prepared, num_rows) or record(
        experiment, target, prepared, num_rows
    )
    write_trace(file, timeline)
    return timeline


def _extrapolated(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline | None:
    """Return the timeline of a micro-batch from those of others, where the cache has them."""
    size = experiment.micro_batch_size
    if size <= KNOWN_SIZES[0]:
        return None  # one sequence may take other paths: an axis of one element is contiguous anyway
    files = [_file_of_size(known, experiment, target, prepared, num_rows) for known in KNOWN_SIZES]
    if not all(file.exists() for file in files):
        return None
    growth = _proven(tuple(files))
    return None if growth is None else growth.extrapolated(size)


@lru_cache(maxsize=4)
def _proven(files: tuple[Path, ...]) -> Growth | None:
    """Return how what the first two files hold grows, if that tells what the third holds."""
    first, second, (size, timeline) = zip(KNOWN_SIZES, map(read_trace, files), strict=True)
    growth = growth_of(first, second)
    return growth if growth is not None and same_memory(growth.extrapolated(size), timeline) else None


def _from_few_layers(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline | None:
    """Return the timeline of a deep model from those of two shallow ones, if that is proven.

    It is where the least of the known micro-batch sizes grows into what they tell, or where they tell a third depth.
    """
    num_layers = experiment.description.num_layers
    if num_layers is None:
        return None
    depths, times = _shallow_depths(experiment, num_layers)
    size, known = experiment.micro_batch_size, _known(experiment, target, prepared, num_rows)
    largest = LARGEST_SHARE * num_layers
    if sum(depths[:2] if known else depths) > largest:
        return None
    timelines = (record(experiment.with_layers(depth), target, prepared, num_rows) for depth in depths)
    first, second = next(timelines), next(timelines)
    extrapolated = extrapolate_depth(first, second, times)
    if extrapolated is None or (known and growth_of(known, (size, extrapolated)) is not None):
        return extrapolated
    told_third = extrapolate_depth(first, second, 2) if sum(depths) <= largest else None
    return extrapolated if told_third is not None and same_memory(told_third, next(timelines)) else None


def _known(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Known | None:
    """Return the least of the known micro-batch sizes, where it is in the cache and `experiment` has a greater one."""
    least = KNOWN_SIZES[0]
    file = _file_of_size(least, experiment, target, prepared, num_rows)
    return (least, read_trace(file)) if experiment.micro_batch_size > least and file.exists() else None


def _shallow_depths(experiment: Experiment, num_layers: int) -> tuple[tuple[int, int, int], int]:
    """Return three numbers of layers, a period of the techniques apart, and the model's own in periods from the least.

    The least has a layer more than a period: the first layer is unlike the others in where its input comes from.
    """
    period = math.lcm(*(technique.layer_period for technique in experiment.techniques))
    least = period + 1 + (num_layers - 1) % period
    return (least, least + period, least + 2 * period), (num_layers - least) // period


def _file_of_size(size: int, experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Path:
    """Return the file of the same experiment at another micro-batch size.

    A CPU keeps a whole batch while it goes through its micro-batches: there the batch is the same, elsewhere it grows.
    """
    passes = experiment.effective_batch_size // experiment.micro_batch_size
    changes = {"micro_batch_size": size, "effective_batch_size": passes * size}
    other = Experiment(experiment.settings.model_copy(update=changes))
    keeps_batch = target.kind == "cpu" and passes > 1
    return trace_file(other, target, prepared, num_rows if keeps_batch else passes * size)


def record(experiment: Experiment, target: Hardware, prepared: Prepared, num_rows: int) -> Timeline:
    """Return what trace() does, by running all of it; `num_rows` is the number of sequences of an optimizer step.

    Raises:
        InvalidInputError: the work depends on the values of tensors, or a model of the user's own raises.

    """
    here = experiment.with_random_weights(str(CARD))
    rows = RepeatedRow(prepared.train, HOST if target.capability else device("cpu"), num_rows)
    build = _from_host if target.capability else on_device
    try:
        with simulated(target) as mode:
            example, workspaces = replace(prepared, train=rows), WorkspaceTable(target.capability)
            timeline = record_lifetimes(here, example, build=build, workspaces=workspaces, run=mode.run)
        return in_order(timeline)
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
        if "/torch/" not in frame.filename and frame.name[:2] != "__" and Path(frame.filename).parent != SIMULATION
    ]
    place = f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
    remedy = "measure this configuration instead: python -m pipeline main"
    if "/transformers/models/" in frames[-1].filename:
        remedy += (
            "; if it is a mixture of experts, set experts_implementation to grouped_mm in its config.json, for eager "
            "routing allocates what the values decide"
        )
    return f"memory is predicted on fake tensors, which have no values, and {place} reads one ({error.func}); {remedy}"
