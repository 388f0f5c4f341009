"""An out-of-memory message in plain words: whose memory it is, whether it is fragmentation, what was asked for."""

from pipeline.base.units import MIB
from pipeline.memory.allocator_options import EXPANDABLE_SEGMENTS
from pipeline.memory.out_of_memory import OutOfMemoryMessage, Place

GIB, KIB = 2**30, 2**10
SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES, ROUND_LARGE_BYTES = 2 * MIB, 20 * MIB, 2 * MIB
"""What torch's allocator asks the card for: up to 1 MiB, up to 10 MiB, and in multiples of (c10/core/AllocatorConfig.h:
kSmallBuffer, kLargeBuffer, kRoundLarge)."""
WORTH_MENTIONING = 0.02
"""Share of a card from which on it is said what others hold, or what is reserved and unused."""
ROUNDING = 32 * MIB
"""What the difference of sizes with two decimals may be from nothing but that."""


def size(num_bytes: int) -> str:
    """Return 2.26 GiB or 512.00 MiB, as torch writes it (c10's format_size)."""
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.2f} {unit}"
    return f"{num_bytes} bytes"


def sentences(message: OutOfMemoryMessage) -> list[str]:
    """Return what a message says, its cause first."""
    if message.place is Place.HOST:
        return _of_host(message)
    if message.place is Place.MPS:
        return _of_mps(message)
    total, free, asked = message.total_bytes, message.free_bytes, message.asked_bytes
    if total is None or free is None or asked is None:
        return _of_library(message)
    found = [_cause(message, total, free, asked), *_whose(message)]
    if message.unallocated_bytes is not None:
        found.append(_fragmentation(message.unallocated_bytes, total, free, asked))
    return [*found, _tensor(asked)]


def _of_host(message: OutOfMemoryMessage) -> list[str]:
    asked = "" if message.asked_bytes is None else f" for {size(message.asked_bytes)}"
    return [
        f"It is the memory of the host, not of a card: {message.library} asked{asked} there.",
        "Whatever makes the training smaller on its card does not help by itself: look for tensors on the CPU, for "
        "weights that are loaded there before they are moved, for many workers of a DataLoader, and for offloading.",
    ]


def _of_mps(message: OutOfMemoryMessage) -> list[str]:
    asked = "" if message.asked_bytes is None else f": {size(message.asked_bytes)} were asked for"
    held = ""
    if message.allocated_bytes is not None and message.allowed_bytes is not None:
        held = f", {size(message.allocated_bytes)} allocated, {size(message.allowed_bytes)} allowed"
    return [f"It is the memory of Apple's GPU{asked}{held}. Fitproof simulates NVIDIA's cards alone."]


def _of_library(message: OutOfMemoryMessage) -> list[str]:
    found = [
        f"{message.library} found no memory on the card ({message.text}), and the message has no sizes.",
        "Libraries take their memory beside torch's allocator, which may have reserved the rest of the card: "
        "`nvidia-smi` says who holds it, torch.cuda.memory_summary() what torch has reserved.",
    ]
    if message.library == "cuBLAS":
        found.append(
            "If the card was not full, an earlier kernel failed, such as an index beyond an embedding: "
            "CUDA_LAUNCH_BLOCKING=1 shows where."
        )
    return found


def _cause(message: OutOfMemoryMessage, total: int, free: int, asked: int) -> str:
    """Return why there was no memory, in one sentence."""
    card = "the card" if message.device is None else f"GPU {message.device}"
    others, unallocated = message.others_bytes or 0, message.unallocated_bytes or 0
    begin = f"{size(asked)} were asked for where {size(free)} of {size(total)} of {card} were free"
    if asked > total:
        return f"The tensor alone is larger than the card: {begin}."
    if message.allowed_bytes is not None and (message.reserved_bytes or 0) + asked > message.allowed_bytes:
        return (
            f"It is a limit: torch.cuda.set_per_process_memory_fraction allows {size(message.allowed_bytes)}, and "
            f"{begin}."
        )
    if (message.allocated_bytes or 0) > total:
        return (
            f"The driver has lent memory of the host, as on Windows and WSL: more is allocated than the card has; "
            f"{begin}."
        )
    if others >= WORTH_MENTIONING * total and free + others >= asked > free:
        return f"Other processes hold {size(others)} of the card; without them there was room: {begin}."
    if free + unallocated >= asked > free:
        return (
            f"At that moment it was fragmentation: {begin}, and {size(unallocated)} are reserved by torch but hold no "
            "tensor."
        )
    if free >= asked:
        return (
            f"The card says that there was room: {begin}. Another process may have held it for a moment, or the "
            "driver refused, as it does on Windows and WSL, or under a limit that it does not name."
        )
    likely = message.likely_others_bytes
    if likely >= WORTH_MENTIONING * total and free + likely >= asked:
        return (
            f"{size(message.beside_bytes or 0)} of the card are neither free nor torch's, which has reserved "
            f"{size(message.reserved_bytes or 0)}: other processes or libraries hold the most of it: {begin}."
        )
    return f"The process itself fills the card: {begin}."


def _whose(message: OutOfMemoryMessage) -> list[str]:
    """Return who holds the memory that is not free."""
    found = []
    if message.others_bytes is not None and message.own_bytes is not None:
        names = [f"process {one.pid}: {size(one.num_bytes)}" for one in message.others]
        named = f" ({', '.join(names)})" if names else ""
        others = (
            f"others {size(message.others_bytes)}{named}" if message.others_bytes > ROUNDING else "no other anything"
        )
        found.append(f"This process holds {size(message.own_bytes)}, {others}.")
    elif message.others:
        names = [f"process {one.pid} {size(one.num_bytes)}" for one in message.others]
        found.append(f"On the card are {', '.join(names)}; which of them is this one, the message does not tell.")
    if message.allocated_bytes is None or message.unallocated_bytes is None:
        return found
    parts = [
        f"{size(message.allocated_bytes)} are in tensors",
        f"{size(message.unallocated_bytes)} reserved by torch's allocator without a tensor",
    ]
    if message.private_pools_bytes:
        parts[0] += f" ({size(message.private_pools_bytes)} of them in pools of CUDA graphs)"
    if message.own_bytes is not None and message.reserved_bytes is not None:
        parts.append(f"{size(max(0, message.own_bytes - message.reserved_bytes))} its CUDA context and libraries'")
    elif message.beside_bytes is not None:
        parts.append(
            f"{size(message.beside_bytes)} are neither free nor torch's: the CUDA context, libraries and other "
            "processes, which this form of the message does not tell apart"
        )
    found.append(f"Of its memory {', '.join(parts[:-1])}, {parts[-1]}.")
    return found


def _fragmentation(unallocated: int, total: int, free: int, asked: int) -> str:
    """Return what expandable segments would give."""
    if asked > free and free + unallocated >= asked:
        return (
            f"With {EXPANDABLE_SEGMENTS} the pieces that no tensor holds become one: up to {size(free + unallocated)} "
            "would have been there; whether the training then fits, a simulation of its command says (-- python ...)."
        )
    if unallocated >= WORTH_MENTIONING * total:
        not_enough = "; that alone is not enough" if asked > free else ""
        return f"Expandable segments ({EXPANDABLE_SEGMENTS}) give back up to {size(unallocated)}{not_enough}."
    return f"It is not fragmentation: no more than {size(unallocated)} are reserved without a tensor."


def _tensor(asked: int) -> str:
    """Return which sizes of a tensor make the allocator ask for so much."""
    if asked <= SMALL_SEGMENT_BYTES:
        return "The tensor was small, of 1 MiB at most: the card was full before."
    if asked == LARGE_SEGMENT_BYTES:
        return "The tensor was small, of 1 to 10 MiB (or of 18 to 20): the card was full before."
    precision = GIB // 200 if asked >= GIB else 0
    least, most = asked - ROUND_LARGE_BYTES - precision, asked + precision
    return (
        f"The tensor has {size(least)} to {size(most)}: up to {most / 4e6:,.1f} million numbers of 32 bits, or "
        f"{most / 2e6:,.1f} of 16."
    )
