"""`FitCallback`: whether a training fits, said inside it before its first step, and how true it was, after its end."""

import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pipeline.base.errors import InvalidInputError, first_line
from pipeline.base.units import MIB
from pipeline.runtime import command_hook
from pipeline.simulation.cards import card_called, find_card
from pipeline.simulation.process import watch
from pipeline.tracking.active_run import ActiveRun, active_run, variables_of_another_store

if TYPE_CHECKING:
    from pipeline.jobs.simulate import SimulatedCommandSettings

FRAMEWORKS = {
    "transformers.trainer_callback": "TrainerCallback",
    "lightning.pytorch.callbacks": "Callback",
    "pytorch_lightning.callbacks": "Callback",
}
"""The class that callbacks of a framework are of, by the module that has it."""
OBSERVED = (watch.FOLDER, command_hook.SOCKET)
"""Variables of processes whose memory is simulated or measured by Fitproof already."""


class DoesNotFitError(RuntimeError):
    """A training does not fit its card, as was found before its first step."""


@dataclass(frozen=True)
class Peaks:
    """What torch's allocator needed at most."""

    allocated_bytes: int
    reserved_bytes: int

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the peaks as metrics."""
        return {
            f"{prefix}peak_allocated_mib": self.allocated_bytes / MIB,
            f"{prefix}peak_reserved_mib": self.reserved_bytes / MIB,
        }

    def __str__(self) -> str:
        return f"{self.allocated_bytes / MIB:,.1f} MiB allocated and {self.reserved_bytes / MIB:,.1f} MiB reserved"


class FitCallback:
    """A callback for the Trainer of transformers or of Lightning, and a context manager for any other loop.

    Before the first step the command of this process runs for three optimizer steps on a simulated card: that of this
    machine with what is free of it, or `gpu`. What it needs and whether it fits is written to stderr; with the action
    "stop", a training that does not fit ends with DoesNotFitError. After the last step the predicted peaks are compared
    with the measured ones, unless they are of another card. All peaks are metrics of the MLflow run that is active.
    """

    _has_begun: ClassVar[bool] = False
    """Whether this process has begun a training: only the first is the one that its command reaches again."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Return an object that is a callback of each framework that has been imported."""
        bases = [getattr(sys.modules[module], name) for module, name in FRAMEWORKS.items() if module in sys.modules]
        return object.__new__(type(cls.__name__, (cls, *bases), {"__module__": cls.__module__}))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__mro__[1], (), {**self.__dict__, "_run": None}

    def __init__(self, action: Literal["warn", "stop"] = "warn", *, gpu: str | None = None, **settings: Any) -> None:
        """Check the settings; those beside `action` are of `fitproof simulate`.

        Raises:
            InvalidInputError: a setting is wrong.

        """
        if action not in ("warn", "stop"):
            raise InvalidInputError(f"action must be warn or stop, not {action!r}; stop ends what does not fit")
        self._action = action
        self._is_of_this_card = gpu is None
        self._given = settings if gpu is None else {**settings, "gpu": gpu}
        self._predicted: Peaks | None = None
        self._run: ActiveRun | None = None
        find_card(_settings({"gpu": "t4", "command": "python", **self._given}).gpu)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Predict, before the first step of transformers' Trainer."""
        self._begin()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Predict, before the first step of Lightning's Trainer."""
        self._begin(trainer.loggers)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Compare with what was measured, after the last step of either Trainer."""
        self._end()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()

    def _begin(self, loggers: Iterable[Any] = ()) -> None:
        if _ranks()[0] != 0:
            return
        self._run = active_run(loggers)
        if any(name in os.environ for name in OBSERVED):
            if self._run is not None:
                self._run.set_killed()
            return
        self._predicted = None
        is_first, FitCallback._has_begun = not FitCallback._has_begun, True
        try:
            if not is_first:
                raise InvalidInputError("only the first training of a process can be simulated, and this is another")
            fits, text = self._simulate()
        except Exception as error:  # whatever it is, the training goes on
            _say(f"it is not known whether this run fits: {error}")
            return
        self._log({} if self._predicted is None else self._predicted.metrics("predicted_"))
        if not fits and self._action == "stop":
            raise DoesNotFitError(text)
        _say(text)

    def _simulate(self) -> tuple[bool, str]:
        """Note the peaks of this process's command on the card; return whether it fits, and what is to be said."""
        from pipeline.jobs.simulate import wanted_run
        from pipeline.prediction.commands.command import why_not
        from pipeline.prediction.commands.simulation import Verdict, simulate
        from pipeline.report.simulation import answer
        from pipeline.runtime.command import NO_UPLOADS

        given = {**(_own_card() if self._is_of_this_card else {}), **self._given}
        settings = _settings({**(_own_command() if "command" not in given else {}), **given})
        with tempfile.TemporaryDirectory(prefix="fitproof-") as name:
            folder = Path(name)
            wanted = replace(wanted_run(settings), variables={**NO_UPLOADS, **variables_of_another_store(folder)})
            _say(f"running `{settings.command}` on a simulated {wanted.card.name} first")
            found = simulate(
                wanted, folder, _say, may_need_values=settings.values == "auto", finds_smallest=False, is_hidden=True
            )
            if found.verdict is Verdict.NONE:
                raise InvalidInputError(f"{answer(found)} {why_not(folder, found.exit_code, found.notes)}")
        if found.largest is not None:
            self._predicted = Peaks(found.largest.peak_allocated_bytes, found.largest.peak_reserved_bytes)
        return found.verdict is Verdict.FITS, " ".join([answer(found), *found.notes])

    def _end(self) -> None:
        if self._predicted is None or not self._is_of_this_card:
            return
        try:
            self._compare(self._predicted)
        except Exception as error:  # whatever it is, the training has ended well
            _say(f"the prediction is not compared with what was measured: {error}")

    def _compare(self, predicted: Peaks) -> None:
        """Say and log how far the prediction is from the peaks of this process."""
        import torch

        number = max(range(torch.cuda.device_count()), key=torch.cuda.max_memory_reserved, default=0)
        measured = Peaks(torch.cuda.max_memory_allocated(number), torch.cuda.max_memory_reserved(number))
        if not measured.allocated_bytes:
            _say(f"predicted {predicted}, and nothing was measured: this process itself used no GPU.")
            return
        error_percent = 100 * (predicted.allocated_bytes / measured.allocated_bytes - 1)
        self._log({**measured.metrics(), "prediction_error_percent": error_percent})
        _say(f"predicted {predicted}, measured {measured}: {error_percent:+.2f} % allocated.")

    def _log(self, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            try:
                self._run.metrics(metrics)
            except Exception as error:  # a store that is not reached ends no training
                _say(f"MLflow has not got the peaks ({first_line(error)}).")


def _settings(given: Mapping[str, Any]) -> "SimulatedCommandSettings":
    from pipeline.config.given import nested, validate
    from pipeline.jobs.simulate import SimulatedCommandSettings

    return validate(SimulatedCommandSettings, nested(given), "simulate")


def _own_command() -> dict[str, Any]:
    """Return the command of this process, and which of how many ranks it is."""
    import torch

    if hasattr(sys, "ps1") or not getattr(sys.modules["__main__"], "__file__", None):
        raise InvalidInputError(
            "the command of this process is run again on a simulated card, and a session without a file has none; "
            'write the training into a file, or name a command: FitCallback(command="python train.py")'
        )
    rank, world_size = _ranks()
    num_cards = 1 if world_size > 1 else max(1, torch.cuda.device_count())
    command = shlex.join([sys.executable, *sys.orig_argv[1:]])
    return {"command": command, "rank": rank, "world_size": world_size, "gpus": num_cards}


def _own_card() -> dict[str, str]:
    """Return the card of this process in words, and how much of its memory the process may have."""
    import torch

    if not torch.cuda.is_available():
        raise InvalidInputError('there is no GPU; name one to be told what it would need: FitCallback(gpu="a100")')
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    memory_mib = device.total_memory // MIB
    closest = card_called(device.name, memory_mib)
    if closest is None:
        words = f"capability={device.major}.{device.minor},multiprocessors={device.multi_processor_count}"
        gpu = f"memory={memory_mib}MiB,{words}"
    else:
        gpu = closest.gpu if closest.memory_mib == memory_mib else f"{closest.gpu},memory={memory_mib}MiB"
    free_mib = (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) // MIB
    return {"gpu": gpu, "budget": f"{min(free_mib, memory_mib - find_card(gpu).context.mib)}MiB"}


def _ranks() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks, which torchrun says before there is a group."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _say(text: str) -> None:
    print(f"Fitproof: {text}", file=sys.stderr, flush=True)  # noqa: T201  # the process is the user's
