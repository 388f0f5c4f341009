"""Reads the messages in which torch and NVIDIA's libraries say that memory is full: every form since torch 1.0.

The sizes are those of c10's format_size: two decimals, in units of 2**10.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

LIBRARY_TEXTS: Mapping[str, str] = {
    "DefaultCPUAllocator: can't allocate memory": "torch",  # c10/core/impl/alloc_cpu.cpp
    "DefaultCPUAllocator: not enough memory": "torch",  # the same on Windows
    "CUDA error: out of memory": "CUDA",  # c10_cuda_check_implementation, and cuSPARSE's CUSPARSE_STATUS_ALLOC_FAILED
    "CUDA driver error: out of memory": "CUDA",  # C10_CUDA_DRIVER_CHECK: expandable segments, memory pools
    "CUBLAS_STATUS_ALLOC_FAILED": "cuBLAS",  # TORCH_CUDABLAS_CHECK
    "CUDNN_STATUS_ALLOC_FAILED": "cuDNN",  # AT_CUDNN_CHECK; up to cuDNN 8
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "cuDNN",  # its name from cuDNN 9 on (cudnn_graph.h)
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "cuDNN",
    "CUSOLVER_STATUS_ALLOC_FAILED": "cuSOLVER",  # TORCH_CUSOLVER_CHECK
    "CUFFT_ALLOC_FAILED": "cuFFT",  # CUFFT_CHECK
    "NVML_SUCCESS == r INTERNAL ASSERT FAILED": "torch",  # the report of an error fails on MIG: pytorch issue 112377
}
"""Texts of out-of-memory errors that are not torch.OutOfMemoryError, and whose they are, with torch's macro.

cuDNN's front end passes the name of the status on; its plans' workspaces are allocated by torch.
"""
_ON_HOST = ("DefaultCPUAllocator", "HOST_ALLOCATION")
_TEXTS: Mapping[str, str] = {
    **{re.escape(text): library for text, library in LIBRARY_TEXTS.items()},
    r"(?:Cuda|CUDA) failure (?:\d+ )?'out of memory'": "NCCL",
    r"Failed to CUDA (?:host )?(?:calloc|malloc) (?:async )?\d+ bytes": "NCCL",
    r"Error out of memory at line \d+ in file": "bitsandbytes",
}
"""These as regular expressions, and those of errors that end no process or raise no exception of torch."""

_SIZE = r"\d+(?:\.\d+)? (?:bytes|[KMG]i?B)"
_UNITS = {"bytes": 0, "K": 10, "M": 20, "G": 30}
_OF_CARDS = rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<asked>{_SIZE})"
_OF_MPS = r"MPS backend out of memory \(MPS allocated: "
_STARTS = re.compile(
    "|".join(
        [
            rf"(?P<card>{_OF_CARDS})",
            rf"(?P<mps>{_OF_MPS})",
            *(rf"(?P<library_{number}>{text})" for number, text in enumerate(_TEXTS)),
        ]
    )
)
_FIELDS = {
    # torch 1.x and 2.0: (GPU 0; 14.76 GiB total capacity; 13.43 GiB already allocated; 17.88 MiB free; ...)
    "total": rf"({_SIZE}) total capacity|has a total capaci?ty of ({_SIZE})",
    "allocated": rf"({_SIZE}) already allocated|Of the allocated memory ({_SIZE}) is allocated by PyTorch",
    "free": rf"({_SIZE}) free|of which ({_SIZE}) is free",
    "allowed": rf"({_SIZE}) allowed",
    "reserved": rf"({_SIZE}) reserved in total by PyTorch",  # 1.4 to 2.0
    "unallocated": rf"({_SIZE}) cached|and ({_SIZE}) is reserved by PyTorch but unallocated",  # cached: before 1.4
    "own": rf"this process has ({_SIZE}) memory in use",
    "private_pools": rf"with ({_SIZE}) allocated in private pools",
}
"""The parts of a message about a card, each in the forms that it has had."""
_DEVICE = re.compile(r"GPU (\d+)(?:;| has)")
_OTHER_PROCESS = re.compile(rf"Process (\d+) has ({_SIZE}) memory in use")
_MPS_FIELDS = re.compile(rf"MPS allocated: ({_SIZE}), other allocations: ({_SIZE}), max allowed: ({_SIZE})")
_CPU_BYTES = re.compile(r"you tried to allocate (\d+) bytes", re.IGNORECASE)
_RANK = re.compile(r"\[(?:default|rank)(\d+)\]|:\d+:\d+ \[(\d+)\] (?:\S+ )?NCCL|\b[Rr]ank[ =:]?(\d+)\b")
"""How torchrun, NCCL (host:process:thread [rank]) and others write it; any other number in brackets may be anything."""
_BREAK = re.compile(r"\s*\n(?:\[\w+\]: ?)?[\s#>|]*")
"""Where a log has broken a message, with the marks of comments and quotations at the beginning of a line."""
_LONGEST = 6000
"""Characters within which a message ends: it names each process on the card."""
_MOST_BYTES = 1 << 50
"""What NVML does not know is written as 2**64 bytes, as under WSL."""
_LEAST_BESIDE, _MOST_BESIDE = -(32 << 20), 2 << 30
"""Bytes of a process beside what torch's allocator reserved: its context, libraries, and what was rounded."""


class Place(StrEnum):
    """Whose memory is full."""

    CARD = "card"
    HOST = "host"
    MPS = "MPS"


@dataclass(frozen=True, kw_only=True)
class ProcessOnCard:
    """A process that a message names, and what it uses of the card."""

    pid: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryMessage:
    """What an out-of-memory message says; None is what it does not say."""

    place: Place
    library: str
    """Whose message it is: torch, CUDA, cuBLAS, cuDNN, cuSOLVER, cuFFT, NCCL or bitsandbytes."""
    text: str
    """Its first words."""
    rank: int | None = None
    device: int | None = None
    """The card's number in its process."""
    asked_bytes: int | None = None
    """As the allocator asked the card for it, which is rounded up."""
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    """By torch's allocator, to tensors."""
    unallocated_bytes: int | None = None
    """Reserved by torch's allocator, and no tensor's."""
    private_pools_bytes: int | None = None
    allowed_bytes: int | None = None
    """What torch.cuda.set_per_process_memory_fraction allows."""
    own_bytes: int | None = None
    """What the process uses of the card, its context and its libraries included."""
    others: tuple[ProcessOnCard, ...] = ()
    """Processes that are named beside it."""

    @property
    def reserved_bytes(self) -> int | None:
        """What torch's allocator has taken of the card."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def others_bytes(self) -> int | None:
        """What other processes use of the card, if the message tells them from this one."""
        if self.total_bytes is None or self.free_bytes is None or self.own_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.own_bytes)

    @property
    def beside_bytes(self) -> int | None:
        """What is neither free nor torch's: other processes, this one's context and libraries."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)

    @property
    def likely_others_bytes(self) -> int:
        """What is others' for certain, or else neither free, nor torch's, nor what a process has beside it at most."""
        if self.others_bytes is not None:
            return self.others_bytes
        return max(0, (self.beside_bytes or 0) - _MOST_BESIDE)

    @property
    def available_bytes(self) -> int | None:
        """What torch's allocator can have of the card while the others keep what they use."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        found = min(self.total_bytes, self.free_bytes + self.reserved_bytes)
        return found if self.allowed_bytes is None else min(found, self.allowed_bytes)


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The messages of a log."""

    first: tuple[OutOfMemoryMessage, ...]
    """The first of each rank, in the order of the log; what follows is often its consequence."""
    num_messages: int


def read_messages(log: str) -> Messages:
    """Return the out-of-memory messages that a log has; ranks are those of its lines, or the cards' numbers."""
    starts = list(_STARTS.finditer(log))
    ends = [*(start.start() for start in starts[1:]), len(log)]
    first: dict[int | None, OutOfMemoryMessage] = {}
    for start, end in zip(starts, ends, strict=False):
        message = _message(log, start, end)
        key = message.rank if message.rank is not None else message.device
        if key is not None or not first:  # one without either follows from one before it
            first.setdefault(key, message)
    return Messages(first=tuple(first.values()), num_messages=len(starts))


def _message(log: str, start: "re.Match[str]", end: int) -> OutOfMemoryMessage:
    rank = _rank_of(log, start.start())
    text = _BREAK.sub(" ", log[start.start() : min(end, start.start() + _LONGEST)])
    if start["card"]:
        return _of_card(text, rank)
    if start["mps"]:
        return _of_mps(text, rank)
    library = next(whose for number, whose in enumerate(_TEXTS.values()) if start[f"library_{number}"])
    is_host = any(part in start[0] for part in _ON_HOST)
    asked = _CPU_BYTES.search(text) if is_host else None
    return OutOfMemoryMessage(
        place=Place.HOST if is_host else Place.CARD,
        library=library,
        text=start[0],
        rank=rank,
        asked_bytes=None if asked is None else int(asked[1]),
    )


def _of_card(text: str, rank: int | None) -> OutOfMemoryMessage:
    sizes = {name: _size_of(re.search(pattern, text)) for name, pattern in _FIELDS.items()}
    asked, device = re.match(_OF_CARDS, text), _DEVICE.search(text)
    assert asked is not None  # that is how it was found
    reserved, allocated, unallocated = sizes["reserved"], sizes["allocated"], sizes["unallocated"]
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    others = [ProcessOnCard(pid=int(pid), num_bytes=_bytes(size)) for pid, size in _OTHER_PROCESS.findall(text)]
    own = sizes["own"]
    if own is None and allocated is not None and unallocated is not None:
        own = _take_own(others, allocated + unallocated)
    return OutOfMemoryMessage(
        place=Place.CARD,
        library="torch",
        text=asked[0],
        rank=rank,
        device=None if device is None else int(device[1]),
        asked_bytes=_bytes(asked["asked"]),
        total_bytes=sizes["total"],
        free_bytes=sizes["free"],
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        private_pools_bytes=sizes["private_pools"],
        allowed_bytes=sizes["allowed"],
        own_bytes=own,
        others=tuple(others),
    )


def _take_own(processes: list[ProcessOnCard], reserved_bytes: int) -> int | None:
    """Remove the process whose message it is from those that it names, and return what it uses.

    In a container a process does not know the number that it has outside, by which NVML calls it: it is then the one
    that uses what torch has reserved and its context.
    """
    fitting = [one for one in processes if _LEAST_BESIDE <= one.num_bytes - reserved_bytes <= _MOST_BESIDE]
    if len(fitting) != 1:
        return None
    processes.remove(fitting[0])
    return fitting[0].num_bytes


def _of_mps(text: str, rank: int | None) -> OutOfMemoryMessage:
    found, asked = _MPS_FIELDS.search(text), re.search(rf"Tried to allocate ({_SIZE})", text)
    allocated, allowed = (_bytes(found[1]), _bytes(found[3])) if found is not None else (None, None)
    return OutOfMemoryMessage(
        place=Place.MPS,
        library="torch",
        text="MPS backend out of memory",
        rank=rank,
        asked_bytes=None if asked is None else _bytes(asked[1]),
        allocated_bytes=allocated,
        allowed_bytes=allowed,
    )


def _rank_of(log: str, index: int) -> int | None:
    """Return the rank that the beginning of a message's line names, as torchrun and NCCL write it."""
    found = _RANK.search(log, log.rfind("\n", 0, index) + 1, index)
    return None if found is None else int(next(filter(None, found.groups())))


def _size_of(found: "re.Match[str] | None") -> int | None:
    if found is None:
        return None
    num_bytes = _bytes(next(group for group in found.groups() if group is not None))
    return num_bytes if num_bytes < _MOST_BYTES else None


def _bytes(size: str) -> int:
    """Return 12.50 MiB in bytes; MPS writes MB for the same unit."""
    number, unit = size.split()
    return round(float(number) * (1 << _UNITS[unit if unit == "bytes" else unit[0]]))
