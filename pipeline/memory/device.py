"""The device of a run: found by its name, with its model, memory and compute capability."""

import platform
import re
from pathlib import Path

import psutil
import pynvml
import torch

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.machines import this_machine
from pipeline.base.processes import num_cores


def find_device(text: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `cuda:1` names on this machine.

    Raises:
        InvalidInputError: it is not the name of a device, this machine does not have it, or this build of torch has no
            kernels for it.

    """
    if text == "auto":
        return _automatic_device()
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise InvalidInputError(f"a device is auto, cpu, cuda or cuda:N, not {text!r}; leave it out for the default")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(index or 0) >= count:
        names = f" ({', '.join(f'cuda:{number}' for number in range(count))})" if count else ""
        raise InvalidInputError(
            f"device {text} needs a CUDA GPU, and this machine has {count}{names}; use device=cpu or auto"
        )
    device = torch.device("cuda", int(index or 0))
    if not _has_kernels(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise InvalidInputError(
            f"the GPU must be one that this build of torch has kernels for ({', '.join(torch.cuda.get_arch_list())}), "
            f"and {device_name(device)} has compute capability {major}.{minor}; for one of 5.0 to 7.2 install torch "
            "2.14 or older built for CUDA 12.6, or use device=cpu"
        )
    return device


def is_named(text: str) -> bool:
    """Whether the name of a device names one GPU of several: cuda:1, and not cuda or auto."""
    return ":" in text


def equal_gpus() -> list[torch.device]:
    """Return the visible GPUs that are of the same model as the first, with as much memory."""
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    kinds = [(one.name, one.total_memory) for one in map(torch.cuda.get_device_properties, gpus)]
    return [gpu for gpu, kind in zip(gpus, kinds, strict=True) if kind == kinds[0]]


def _automatic_device() -> torch.device:
    """Return the first GPU if this build of torch can use it, else the CPU."""
    device = torch.device("cuda", 0)
    return device if torch.cuda.is_available() and _has_kernels(device) else torch.device("cpu")


def _has_kernels(device: torch.device) -> bool:
    """Whether this build of torch has machine code or PTX that the GPU can run; True if it names neither."""
    capability = torch.cuda.get_device_capability(device)
    built = re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    versions = [(kind, (int(major), int(minor))) for kind, major, minor in built]
    return not versions or any(
        version <= capability and (kind == "compute" or version[0] == capability[0]) for kind, version in versions
    )


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
        torch.cuda.set_per_process_memory_fraction(fraction_of(budget_bytes, total_bytes(device)), device)


def fraction_of(budget_bytes: int, total: int) -> float:
    """Return a share of `total` bytes of which torch makes exactly `budget_bytes`: it multiplies and rounds down.

    The quotient alone can be rounded to a byte less. (setMemoryFraction of c10/cuda/CUDACachingAllocator.cpp)
    """
    return min(1.0, (budget_bytes + 0.5) / total)


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
        count=(torch.cuda.device_count() if properties else num_cores()) * this_machine().count,
    )
