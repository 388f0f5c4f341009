"""The device of a run: found by its name, with its model, memory and compute capability."""

import platform
from pathlib import Path

import psutil
import pynvml
import torch

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError


def find_device(text: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` names on this machine.

    Raises:
        InvalidInputError: it is not the name of a device, or this machine does not have it.

    """
    if text == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise InvalidInputError(f"a device is auto, cpu, cuda or cuda:N, not {text!r}; leave it out for the default")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        raise InvalidInputError(f"device {text} needs a CUDA GPU, and this machine has {count}; use device=cpu or auto")
    return torch.device("cuda", int(index or 0))


def total_bytes(device: torch.device) -> int:
    """Return the total memory of a GPU, or of this machine, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def occupy(device: torch.device, budget_bytes: int | None) -> None:
    """Make a GPU the current device of this process, and limit its caching allocator to the budget.

    The CUDA context, which this creates, is not part of the budget.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    if budget_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(budget_bytes / total_bytes(device), device)


def used_bytes(device: torch.device) -> int | None:
    """Return the bytes that all processes use on a GPU, as reported by NVML; None without NVML."""
    if device.type != "cuda":
        return None
    try:
        return int(torch.cuda.device_memory_used(device))
    except (RuntimeError, ImportError, pynvml.NVMLError):
        return None


def free_bytes(device: torch.device) -> int:
    """Return the memory in bytes that no process uses: the card's or, on a CPU, this machine's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    used = used_bytes(device)
    return int(torch.cuda.mem_get_info(device)[0]) if used is None else total_bytes(device) - used


def device_name(device: torch.device) -> str:
    """Return the model name of the GPU or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware_of(device: torch.device) -> Hardware:
    """Return the hardware of a device of this machine."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Hardware(
        kind=device.type,
        name=device_name(device),
        memory_bytes=total_bytes(device),
        capability=(properties.major, properties.minor) if properties else None,
        num_multiprocessors=properties.multi_processor_count if properties else None,
    )
