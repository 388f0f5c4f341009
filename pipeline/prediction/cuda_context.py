"""The size of a CUDA context: measured once if the card is in this machine, else an assumed value."""

import hashlib

import torch

from pipeline.base.contracts import Hardware
from pipeline.base.files import cache_folder, write_atomically
from pipeline.memory.device import device_name, used_bytes
from pipeline.prediction.cards import CONTEXT_BYTES
from pipeline.runtime.environment import environment
from pipeline.runtime.worker_pool import run_all, worker_pool

WIDTH = 256
"""Width of the matrices whose product loads the libraries that training uses."""


def context_bytes_of(target: Hardware) -> int:
    """Return the bytes of the CUDA context on `target`, which come on top of the reserved bytes; 0 on a CPU.

    A measurement is cached by card, driver and version of torch.

    Raises:
        InvalidInputError: the cache folder cannot be written.

    """
    if target.kind != "cuda":
        return 0
    device = _own_device(target)
    if device is None:
        return CONTEXT_BYTES
    about = environment(device)
    facts = [about.get(name) for name in ("device_name", "driver", "torch", "cuda")]
    file = cache_folder() / f"context-{hashlib.sha256(repr(facts).encode()).hexdigest()[:20]}.txt"
    if file.exists():
        return int(file.read_text())
    with worker_pool(1) as pool:  # a new process, which has no context yet
        [(_, measured)] = run_all(pool, measure_context, [device])
    if measured is None:
        return CONTEXT_BYTES
    write_atomically(file, str(measured).encode())
    return measured


def measure_context(device: torch.device) -> int | None:
    """Initialize a GPU, and return the bytes in use other than those that torch reserved; None without NVML.

    Another process that starts or ends on the card at the same time would be counted too.
    """
    before = used_bytes(device)
    square = torch.ones(WIDTH, WIDTH, device=device)
    (square @ square).sum().item()  # waits for the device
    after = used_bytes(device)
    if before is None or after is None:
        return None
    taken = after - before - torch.cuda.memory_reserved(device)
    return taken if taken > 0 else None


def _own_device(target: Hardware) -> torch.device | None:
    """Return a device of this machine that is such a card, if there is one."""
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return next((device for device in devices if device_name(device) == target.name), None)
