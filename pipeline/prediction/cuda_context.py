"""The size of a CUDA context: measured once a week if the card is in this machine, else an assumed value."""

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.files import cache_folder, write_atomically
from pipeline.base.results import Outcome
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.memory.device import device_name, used_bytes
from pipeline.prediction.cards import assumed_context_bytes
from pipeline.runtime.environment import environment
from pipeline.runtime.observer import Observer
from pipeline.runtime.run import execute
from pipeline.techniques.precision import Precision
from pipeline.training.loop import train

SETTINGS = {
    "model": "gpt2-nano",
    "causal_lm": {"width": 128, "num_heads": 2},  # heads of 64 channels, as most models have
    "sequence_length": 128,
    "micro_batch_size": 2,
    "effective_batch_size": 2,
    "num_steps": 3,
    "timing_warmup_steps": 2,
    "eval_steps": 0,
}
"""Settings of the training before which and after which memory is read."""
PRECISIONS = get_args(Precision.model_fields["precision"].annotation)
FACTS = ("device_name", "driver", "torch", "cuda", "transformers")
"""What the size depends on besides the kernels that the training loads."""
VALID_SECONDS = 7 * 24 * 3600
"""How long a measurement counts: what is not among FACTS may change the size too."""
NUM_READINGS = 4
"""How often the context is measured at most, until two readings agree."""
SAME_BYTES = 2 * MIB
"""Difference up to which readings agree: the driver takes memory in pages of this size."""


@cache
def context_bytes_of(target: Hardware) -> int:
    """Return the bytes of the CUDA context on `target`, which come on top of the reserved bytes; 0 on a CPU.

    A measurement is cached for a week, by card, driver, versions and training, and is made once in a process.

    Raises:
        InvalidInputError: the cache folder cannot be written.
        KeyboardInterrupt: Ctrl-C ended the measurement.

    """
    if target.kind != "cuda":
        return 0
    device = _own_device(target)
    if device is None:
        return assumed_context_bytes(target)
    experiments = trainings(device, target)
    about = environment(device)
    key = [about.get(name) for name in FACTS], [experiment.params() for experiment in experiments]
    file = cache_folder() / f"context-{hashlib.sha256(repr(key).encode()).hexdigest()[:20]}.txt"
    if file.exists() and time.time() - file.stat().st_mtime < VALID_SECONDS:
        return int(file.read_text())
    measured = _agreed(experiments)
    if measured is None:
        return assumed_context_bytes(target)
    write_atomically(file, str(measured).encode())
    return measured


def trainings(device: torch.device, target: Hardware) -> list[Experiment]:
    """Return a short training on a device in each precision that it supports."""
    settings = [{**SETTINGS, "device": str(device), "precision": precision} for precision in PRECISIONS]
    experiments = [make_experiment(each, "main") for each in settings]
    return [experiment for experiment in experiments if experiment.unsupported(target) is None]


def _agreed(experiments: Sequence[Experiment]) -> int | None:
    """Return the least of several readings, of those that another one confirms.

    A process that starts on the card during a reading makes it too large, and one that ends too small. It is None if no
    two readings agree, or if there are none.
    """
    readings = list[int]()
    for _ in range(NUM_READINGS):
        reading = measure_context(experiments)
        if reading is None:
            return None
        for other in readings:
            if abs(reading - other) <= SAME_BYTES:
                return min(reading, other)
        readings.append(reading)
    return None


def measure_context(experiments: Sequence[Experiment]) -> int | None:
    """Train in a clean process, and return the bytes in use then other than those that torch reserved.

    Kernels are loaded when they are first used, so that the context grows with each precision. None without NVML, or if
    the training fails. Another process that starts or ends on the card at the same time is counted too.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the process.

    """
    received = _Received()
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_train_all, experiments)
        result = execute(experiments[0], Path(folder) / "log.txt", [received], work=work)
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return received.taken_bytes if received.taken_bytes and received.taken_bytes > 0 else None


class _Received(Observer):
    """Receives the bytes that _train_all() emits."""

    taken_bytes: int | None = None

    def message(self, message: Any) -> None:
        """Receive them."""
        self.taken_bytes = message


def _train_all(
    experiments: Sequence[Experiment], first: Experiment, prepared: Prepared, emit: Callable[[Any], None]
) -> None:
    """Train each experiment in this process, and emit the bytes that this took outside the caching allocator."""
    before = used_bytes(first.device)
    for experiment in experiments:
        train(experiment, prepared, lambda _: None)
    after = used_bytes(first.device)
    if before is not None and after is not None:
        emit(after - before - torch.cuda.memory_reserved(first.device))


def _own_device(target: Hardware) -> torch.device | None:
    """Return a device of this machine that is such a card, if there is one."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((device for device in devices if device_name(device) == target.name_of_one), None)
