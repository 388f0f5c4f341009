"""Where the processes of several workers run: each on a GPU of its own, or on its share of a CPU's cores."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import cores
from pipeline.memory.device import equal_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that CUDA shows to a process."""


@dataclass(frozen=True)
class Placement:
    """Where a run's process runs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables, set before its first CUDA call."""
    cores: frozenset[int] | None = None
    """The cores that it may use; None: all that this process may use."""


ANYWHERE = Placement()
"""On the device of the experiment, and on all cores."""


def placements(device: torch.device, is_named: bool, num_workers: int | None, num_devices: int = 1) -> list[Placement]:
    """Return the place of each worker, which has `num_devices` GPUs; None: as many workers as the visible GPUs allow
    that are like the first, or one on a CPU and on a GPU that the user has named.

    A single worker runs on the device itself. Of several, each sees its own GPUs, or has an equal share of the cores.

    Raises:
        InvalidInputError: there are fewer equal GPUs, or cores, than workers, or several workers are to share one named
            GPU.

    """
    is_cuda = device.type == "cuda"
    gpus = [gpu.index for gpu in equal_gpus()] if is_cuda else []
    num_available = len(gpus) // num_devices if is_cuda else len(cores())
    if num_workers is None:
        num_workers = max(1, num_available) if is_cuda and not is_named else 1
    if num_workers == 1:
        return [ANYWHERE]
    if num_workers > num_available:
        kind = "a core" if not is_cuda else f"{num_devices} visible GPUs" if num_devices > 1 else "a visible GPU"
        num_visible = torch.cuda.device_count() if is_cuda else 0
        is_mix = len(gpus) < num_visible
        like = f", all of one model, and only {len(gpus)} of {num_visible} are like the first" if is_mix else ""
        raise InvalidInputError(
            f"each worker needs {kind} of its own{like}, and this machine has enough for {num_available} of "
            f"{num_workers} workers; set workers to {num_available} or less"
            f"{f', or choose GPUs with {VISIBLE}' if is_mix else ''}"
        )
    if is_cuda:
        if is_named:
            raise InvalidInputError(
                f"{num_workers} workers need as many GPUs, and device={device} names one; set device=cuda, or workers=1"
            )
        shown = os.environ.get(VISIBLE)
        names = [name.strip() for name in shown.split(",")] if shown else list(map(str, range(max(gpus) + 1)))
        own = [names[number] for number in gpus]
        groups = [own[start : start + num_devices] for start in range(0, num_workers * num_devices, num_devices)]
        return [Placement({VISIBLE: ",".join(group)}) for group in groups]
    share = len(cores()) // num_workers
    shares = [cores()[number * share : (number + 1) * share] for number in range(num_workers)]
    return [Placement(cores=frozenset(some)) for some in shares]
