"""Recordings: an Experiment's timeline on fake tensors, as on a CPU."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from pipeline.base.contracts import Prepared, Trainable
from pipeline.base.errors import InvalidInputError, first_line, origin
from pipeline.base.ranks import Ranks
from pipeline.base.technique import Step
from pipeline.config.experiment import Experiment
from pipeline.memory.recorder import LifetimeRecorder
from pipeline.memory.timeline import Timeline
from pipeline.prediction.fake.bitsandbytes import four_bit_layers, quantize, quantized_states
from pipeline.prediction.fake.cached_operators import CachedFakeTensorMode
from pipeline.prediction.fake.cpu_buffers import cpu_buffers
from pipeline.prediction.fake.gradient_buckets import GradientBuckets
from pipeline.prediction.fake.operators import ctc_loss, grouped_products
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.prediction.patches import masks_of, without_values
from pipeline.techniques._support import data_parallel
from pipeline.training.profiler import record_first_steps
from pipeline.training.step import with_parameters

PREDICTION = Path(__file__).parents[1]
"""The folder of the replacements for torch's functions, which are left out of error messages."""
LIBRARIES = Path(sysconfig.get_path("purelib"))
CPU = torch.device("cpu")
NO_NUMPY = ".numpy() is not supported for tensor subclasses"
"""What torch says where a fake tensor is made an array."""
EXPERTS = ("expert", "moe")
"""Words in the names that transformers gives to mixtures of experts."""
EXPERTS_REMEDY = (
    "; eager routing of experts allocates memory that depends on values: set experts_implementation to grouped_mm in "
    "the model's config.json"
)


def record(experiment: Experiment, prepared: Prepared, num_rows: int) -> Timeline:
    """Record all of two optimizer steps of `num_rows` sequences; `experiment` has random weights, and is on a CPU.

    A model whose code reads values while it builds it is built with them, which are then left out.

    Raises:
        InvalidInputError: why it cannot be predicted; the steps read the values of tensors, for example.

    """
    try:
        try:
            return _record(experiment, prepared, num_rows)
        except _NeedsValuesError as error:
            without = str(error)  # outside of this clause the half-built model is freed
        name, seed = experiment.settings.model, experiment.settings.seed
        built = experiment.model.built_with_values(name, prepared.vocabulary_size, without, seed)
        return _record(experiment, prepared, num_rows, built)
    except InvalidInputError:
        raise
    except Exception as error:  # whatever a model or a technique raises without values
        raise InvalidInputError(why_not_recorded(error)) from error


@contextmanager
def simulated(**masks: bool) -> Iterator[CachedFakeTensorMode]:
    """Create fake tensors inside this context; the process is restored on exit; `masks` is what is known of masks."""
    with (
        without_values(**masks),
        patch.object(data_parallel, "DistributedDataParallel", GradientBuckets),
        grouped_products(),
        ctc_loss(),
        four_bit_layers(),
        CachedFakeTensorMode() as mode,
    ):
        yield mode


class _NeedsValuesError(Exception):
    """A model cannot be built on fake tensors; the message says why."""


def _record(experiment: Experiment, prepared: Prepared, num_rows: int, built: Trainable | None = None) -> Timeline:
    """Record the steps of a model, which is built on fake tensors unless it is given with values.

    Raises:
        _NeedsValuesError: it cannot be built on fake tensors.

    """

    def build(experiment: Experiment, prepared: Prepared, ranks: Ranks) -> Step:
        trainable = built or _fake_model(experiment, prepared)
        if built is not None:
            _leave_out_values(built.module)
        step = with_parameters(experiment, trainable, ranks)
        quantize(step.trainable.module)
        return step

    rows = RepeatedRow(prepared.train, num_rows)
    with (
        _threads(experiment.num_threads),
        quantized_states(experiment),
        simulated(**masks_of(experiment, prepared)) as mode,
    ):
        example = replace(prepared, train=rows)
        recorder = LifetimeRecorder(experiment.device, cpu_buffers, mode.run)
        record_first_steps(experiment, example, recorder, build=build)
        return recorder.timeline()


def _fake_model(experiment: Experiment, prepared: Prepared) -> Trainable:
    try:
        return experiment.model.build(experiment.settings.model, prepared.vocabulary_size)
    except Exception as error:  # of the model's code: with values it may be built, or raise what the user is to see
        raise _NeedsValuesError(why_not_recorded(origin(error))) from error


def _leave_out_values(module: nn.Module) -> None:
    """Replace the tensors of a module by fake ones of the same form; those that share a storage still do."""
    made: dict[tuple[int, torch.dtype], Tensor] = {}
    parameters: dict[int, nn.Parameter] = {}

    def without_values(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, num_elements = (storage._cdata, tensor.dtype), storage.nbytes() // tensor.itemsize
        if key not in made:
            form = (tensor.shape, tensor.stride()) if tensor.numel() == num_elements else ((num_elements,), (1,))
            made[key] = torch.empty_strided(*form, dtype=tensor.dtype, device=CPU)
        alike = made[key]
        if (alike.shape, alike.stride()) != (tensor.shape, tensor.stride()):
            alike = alike.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if not isinstance(tensor, nn.Parameter):
            return alike
        if id(tensor) not in parameters:
            parameters[id(tensor)] = nn.Parameter(alike, requires_grad=tensor.requires_grad)
        return parameters[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, tensor in list(tensors.items()):
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                    tensors[name] = without_values(tensor)  # type: ignore[assignment]


@contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Let torch compute with so many threads, on which the memory of some of a CPU's operators depends."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def why_not_recorded(error: BaseException) -> str:
    """Return why a step cannot run on fake tensors, with the line that reads a value or raises the error."""
    place = _place(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException) or NO_NUMPY in str(error):
        reason = f"{place or 'the step'} reads a value, and a prediction runs the step on tensors without values"
        is_of_experts = "transformers/models/" in str(place) and any(word in str(place).lower() for word in EXPERTS)
        return reason + (EXPERTS_REMEDY if is_of_experts else "")
    where = f" in {place}" if place else ""
    return f"on tensors without values the step raises {type(error).__name__}{where}: {first_line(error)}"


def _place(error: BaseException) -> str | None:
    """Return the method of a module that was running, else the function, with its file and line.

    Those of torch and of the prediction itself are left out.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "/torch/" not in frame.f_code.co_filename
        and frame.f_code.co_name[:2] != "__"
        and not Path(frame.f_code.co_filename).is_relative_to(PREDICTION)
    ]
    if not frames:
        return None
    of_modules = [(frame, line) for frame, line in frames if isinstance(frame.f_locals.get("self"), nn.Module)]
    frame, line = (of_modules or frames)[-1]
    file = Path(frame.f_code.co_filename)
    folder = next((one for one in (Path.cwd(), LIBRARIES) if file.is_relative_to(one)), None)
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return f"{name} ({file.relative_to(folder) if folder else file}:{line})"
