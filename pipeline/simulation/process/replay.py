"""Gives torch's allocator the requests of a recorded process again, and finds the smallest cap that serves them.

    python replay.py SNAPSHOT DEVICE     on a simulated card; prints peak_reserved_bytes and smallest_cap_bytes as JSON

The allocator is torch's own; the settings of the environment count, so that expandable segments can be compared. A
process that CUDA graphs have given memory pools of their own cannot be replayed: then it prints {}.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

GRANULE = 1 << 21
"""The allocator reserves in multiples of this size, and caps are found to it."""


def main(snapshot: Path, device: int) -> None:
    """Print what the allocator reserves for the requests of a snapshot's process on a card."""
    trace = pickle.loads(snapshot.read_bytes())["device_traces"][device]  # noqa: S301  # the parent's own file
    if any(tuple(event.get("pool_id", (0, 0))) != (0, 0) for event in trace):
        print("{}")  # noqa: T201
        return
    import torch

    torch.cuda.synchronize()  # begins to use the card
    requests = compact(trace, torch)
    peak = replay(requests, torch, None)
    assert peak is not None  # without a cap the simulated card has room
    low, high = 0, -(-peak // GRANULE)
    while low + 1 < high:
        middle = (low + high) // 2
        if replay(requests, torch, middle * GRANULE) is None:
            low = middle
        else:
            high = middle
    print(json.dumps({"peak_reserved_bytes": peak, "smallest_cap_bytes": high * GRANULE}))  # noqa: T201


def compact(trace: list[dict[str, Any]], torch: Any) -> list[tuple[str, int, int, Any]]:
    """Return the requests as (action, address, size, stream), with one "empty" for segments given back in a row."""
    streams: dict[int, Any] = {0: torch.cuda.default_stream()}
    found: list[tuple[str, int, int, Any]] = []
    was_empty = False
    for event in trace:
        action = event["action"]
        if action == "segment_free" and not was_empty:
            found.append(("empty", 0, 0, None))
        was_empty = action == "segment_free"
        if action in ("alloc", "free_completed"):
            if event["stream"] not in streams:
                streams[event["stream"]] = torch.cuda.Stream()
            found.append((action, event["addr"], event["size"], streams[event["stream"]]))
    return found


def replay(requests: list[tuple[str, int, int, Any]], torch: Any, cap_bytes: int | None) -> int | None:
    """Return the peak of reserved bytes, or None if the allocator runs out of memory under a cap."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap_bytes is None else cap_bytes / total)
    alive = {}
    try:
        for action, address, size, stream in requests:
            if action == "alloc":
                alive[address] = torch.cuda.caching_allocator_alloc(size, 0, stream)
            elif action == "empty":
                torch.cuda.empty_cache()
            elif address in alive:
                torch.cuda.caching_allocator_delete(alive.pop(address))
        peak: int = torch.cuda.max_memory_reserved()
        return peak
    except torch.OutOfMemoryError:
        return None
    finally:
        for pointer in alive.values():
            torch.cuda.caching_allocator_delete(pointer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
