"""Saves a training in a folder, from which it goes on, with torch.distributed.checkpoint.

Weights and optimizer state are saved as whole, whichever parts each rank has: any number of ranks reads its own parts.
"""

import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.technique import Stage
from pipeline.config.experiment import Experiment
from pipeline.config.given import dotted, written
from pipeline.config.settings import TECHNIQUES, default_values
from pipeline.config.variants import SAVED_CONFIG, read_yaml

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from pipeline.training.loop import Loop

NUM_STEPS = "num_steps"
"""The key of the number of optimizer steps that were taken."""
MODEL, OPTIMIZER, RANDOM, SCALER = "model.", "optimizer.", "random.", "scaler."
"""Beginnings of keys: weights and buffers by name, the optimizer's state, the ranks' generators, the loss scale."""
MAKE_STATE = (Stage.WEIGHTS, Stage.ADAPTER, Stage.OPTIMIZER)
"""Stages of the techniques that decide which weights and which optimizer state there are."""


@dataclass(frozen=True)
class Saving:
    """Where and how often a training is saved, and from where it goes on."""

    folder: Path = Path("saved")
    """Each save is a folder step_N in it, of which the newest is kept."""
    every: int | None = None
    """Optimizer steps from one save to the next; the last one is saved too. None: it is not saved."""
    resume: Path | None = None
    """A save that it goes on from; None: it begins anew."""

    def ends(self, num_taken: int, num_steps: int) -> list[int]:
        """Return the numbers of optimizer steps after which it is saved, if it is, the last of all included."""
        if self.every is None:
            return [num_steps]
        return [*range(-(-num_taken // self.every) * self.every, num_steps, self.every), num_steps]

    def save(self, loop: "Loop", experiment: Experiment) -> None:
        """Save a training, if it is to be saved, and remove the save before."""
        if self.every is None:
            return
        from torch.distributed.checkpoint.state_dict_saver import save

        ranks, folder = loop.step.ranks, self.folder / f"step_{loop.num_launched}"
        unfinished = folder.with_suffix(".unfinished")
        ranks.entered()
        with _in_one_process():
            save(_state(loop), checkpoint_id=unfinished)
        if ranks.rank == 0:
            (unfinished / SAVED_CONFIG).write_text(experiment.to_yaml())
            unfinished.rename(folder)
            for old in self.folder.glob("step_*"):
                if old != folder:
                    shutil.rmtree(old)

    @property
    def newest(self) -> Path | None:
        """The save of this training; None if there is none yet."""
        folders = [folder for folder in self.folder.glob("step_*") if not folder.suffix]  # two, if it was killed
        return max(folders, key=lambda folder: int(folder.name.removeprefix("step_")), default=None)


NEVER_SAVED = Saving()
"""Of a training that begins anew and is not saved."""


def restore(loop: "Loop", folder: Path) -> None:
    """Let a loop that has taken no step go on from a save in `folder`.

    Raises:
        RuntimeError: its weights or its optimizer state are others.

    """
    from torch.distributed.checkpoint.state_dict_loader import load

    _make_optimizer_state(loop.step.trainable.module, loop.optimizer)
    state, saved = _state(loop), _metadata(folder).state_dict_metadata
    _refuse_others(state, saved)
    loaded = {key: value for key, value in state.items() if key in saved}
    loop.step.ranks.entered()
    with _in_one_process():
        load(loaded, checkpoint_id=folder)
    for key, parameter in _optimized(loop.optimizer):
        own = {name: loaded.get(f"{key}{name}") for name in loop.optimizer.state.get(parameter, {})}
        found = {name: value for name, value in own.items() if value is not None}
        if found:
            loop.optimizer.state[parameter].update(found)
        else:  # it had no gradient yet
            loop.optimizer.state.pop(parameter, None)
    scaler = {key.removeprefix(SCALER): value for key, value in loaded.items() if key.startswith(SCALER)}
    if scaler:
        loop.step.scaler.load_state_dict(scaler)
    generators = _random(loop)
    if generators.keys() <= loaded.keys():  # else on another number of ranks, or another device
        torch.set_rng_state(loaded[_random_key(loop, "cpu")])
        if loop.step.device.type == "cuda":
            torch.cuda.set_rng_state(loaded[_random_key(loop, "cuda")], loop.step.device)
    loop.go_on_from(loaded[NUM_STEPS])


def check_saved(folder: Path, experiment: Experiment) -> int:
    """Return after how many optimizer steps a training was saved that is to go on as `experiment`.

    Raises:
        InvalidInputError: it cannot be read, is of another model or optimizer, or has no steps left.

    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    taken = {NUM_STEPS: 0}
    try:
        for one in _metadata(folder).storage_data.values():
            if (folder / one.relative_path).stat().st_size < one.offset + one.length:
                raise EOFError(f"{one.relative_path} is too short")
        with _in_one_process():
            load(taken, checkpoint_id=folder, no_dist=True)
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError, CheckpointException) as error:
        raise InvalidInputError(
            f"resume must be a folder that save_every wrote, such as runs/.../saved/step_100, and {folder} cannot be "
            f"read as one ({first_line(error)}); name another"
        ) from error
    saved = default_values() | dict(dotted(read_yaml(folder / SAVED_CONFIG)))
    for name, now in experiment.params().items():
        if _makes_state(name, experiment) and (before := saved[name]) != now:
            raise InvalidInputError(
                f"a training goes on with the model and optimizer that it was saved with, and {name} is "
                f"{written(before)} in {folder} and {written(now)} here; set {name}={written(before)}, or resume=none"
            )
    if taken[NUM_STEPS] >= experiment.num_steps:
        raise InvalidInputError(
            f"num_steps counts all optimizer steps, those of {folder} included, which are {taken[NUM_STEPS]}, and "
            f"num_steps is {experiment.num_steps}; set it to {taken[NUM_STEPS] + 1} or more"
        )
    return taken[NUM_STEPS]


def _makes_state(name: str, experiment: Experiment) -> bool:
    """Whether a setting decides which weights and which optimizer state a training has."""
    of_techniques = (one.model_fields for one in TECHNIQUES.values() if one.stage in MAKE_STATE)
    settings: Any = experiment.settings
    has_frozen = settings.adapter != "none" or settings.task == "dpo"  # which are made anew, not saved
    return (
        name in ("model", "task", *(("seed", "vocabulary_size") if has_frozen else ()))
        or name.startswith(f"{experiment.family}.")
        or any(name in fields for fields in of_techniques)
    )


def _state(loop: "Loop") -> dict[str, Any]:
    """Return all that a training goes on from, by name; its tensors are the training's own."""
    module, scaler = loop.step.trainable.module, loop.step.scaler
    persistent = module.state_dict().keys()
    weights = {name: one for name, one in module.named_parameters() if one.requires_grad}  # others are built again
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    state: dict[str, Any] = {f"{MODEL}{name}": value for name, value in {**weights, **buffers}.items()}
    own = {id(weight) for weight in weights.values()}
    for key, parameter in _optimized(loop.optimizer):
        values = loop.optimizer.state.get(parameter, {}).items()
        state |= {f"{key}{name}": value for name, value in values if isinstance(value, Tensor | int | float)}
        if id(parameter) not in own:
            state[f"{key}copy"] = parameter
    state |= {f"{SCALER}{name}": value for name, value in scaler.state_dict().items()}
    return {NUM_STEPS: loop.num_launched, **state, **_random(loop)}


def _optimized(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of an optimizer, which may be copies of the model's, each with the beginning of its keys."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    yield from ((f"{OPTIMIZER}{number}.", parameter) for number, parameter in enumerate(parameters))


def _random(loop: "Loop") -> dict[str, Tensor]:
    """Return the states of this rank's generators, on which its dropout depends."""
    states = {_random_key(loop, "cpu"): torch.get_rng_state()}
    if loop.step.device.type == "cuda":
        states[_random_key(loop, "cuda")] = torch.cuda.get_rng_state(loop.step.device)
    return states


def _random_key(loop: "Loop", kind: str) -> str:
    return f"{RANDOM}{loop.step.ranks.rank}_of_{loop.step.ranks.size}.{kind}"


def _make_optimizer_state(module: nn.Module, optimizer: Optimizer) -> None:
    """Make the optimizer's state as its first step does: for gradients of zero, one at a time, at a rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained]  # DistributedDataParallel's buckets
    optimizer.zero_grad(set_to_none=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
        type(optimizer).step(optimizer)  # that of the instance may do nothing, where the backward pass updates
        parameter.grad = None
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _metadata(folder: Path) -> "Metadata":
    """Return what is in a save, and in which of its files."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def _refuse_others(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise RuntimeError unless the saved weights and optimizer state are those of this training."""
    missing = {key for key in state if key.startswith(MODEL)} - saved.keys()
    unknown = {key for key in saved.keys() - state.keys() if key.startswith((MODEL, OPTIMIZER))}
    both = [(key, saved[key], value) for key, value in state.items() if isinstance(value, Tensor) and key in saved]
    differing = {key for key, before, now in both if getattr(before, "size", None) != now.shape}
    for what, keys in (("lacks", missing), ("also has", unknown), ("has another shape of", differing)):
        if keys:
            raise RuntimeError(f"the training was saved with another model or optimizer: it {what} {min(keys)}")


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Leave out torch's warning that a single process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
