"""Gives torch's allocator the requests of a recorded process again, and finds the smallest cap that serves them.

    python replay.py SNAPSHOT DEVICE VARIABLES     on a simulated card

VARIABLES is a list in JSON: for each of its objects the allocator serves the requests with these variables of the
environment, so that expandable segments can be compared. The list of smallest caps in bytes is printed as JSON. The
allocator is torch's own. null stands where the requests cannot be given again, as those of a process that CUDA graphs
have given memory pools of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

GRANULE = 1 << 21
"""The allocator reserves in multiples of this size, and caps are found to it."""


def main(snapshot: Path, device: int, variables: list[dict[str, str]]) -> None:
    """Print the smallest caps under which the allocator serves the requests of a snapshot's process on a card."""
    trace = pickle.loads(snapshot.read_bytes())["device_traces"][device]  # noqa: S301  # the parent's own file
    if any(tuple(event.get("pool_id", (0, 0))) != (0, 0) for event in trace):
        print(json.dumps([None for _ in variables]))  # noqa: T201
        return
    import torch  # noqa: F401  # once for all the processes that are forked

    forks = [ProcessPoolExecutor(1, multiprocessing.get_context("fork")) for _ in variables]
    caps = [fork.submit(cap_with, trace, own) for fork, own in zip(forks, variables, strict=True)]
    print(json.dumps([None if cap.exception() else cap.result() for cap in caps]))  # noqa: T201


def cap_with(trace: list[dict[str, Any]], variables: dict[str, str]) -> int:
    """Return the smallest cap; torch reads the variables when it begins to use the card: not before this."""
    import torch

    os.environ.update(variables)
    torch.cuda.synchronize()
    return smallest_cap(trace, torch)


def smallest_cap(trace: list[dict[str, Any]], torch: Any) -> int:
    """Return the smallest cap in bytes under which this process's allocator, which is empty, serves the requests."""
    requests = compact(trace, torch)
    peak = replay(requests, torch, None)
    assert peak is not None  # without a cap the simulated card has room
    low, high = (-(-num_bytes // GRANULE) for num_bytes in (torch.cuda.max_memory_allocated(), peak))
    low -= 1  # too little for what was allocated
    while low + 1 < high:  # bisect has no key in Python 3.9, which may run here
        middle = (low + high) // 2
        if replay(requests, torch, middle * GRANULE) is None:
            low = middle
        else:
            high = middle
    return high * GRANULE


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
    """Return the peak of reserved bytes; None if it needs more than a cap, which expandable segments may exceed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    share = 1.0 if cap_bytes is None else (cap_bytes + 0.5) / total  # torch multiplies and rounds down
    torch.cuda.set_per_process_memory_fraction(share)
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
        return peak if cap_bytes is None or peak <= cap_bytes else None
    except torch.OutOfMemoryError:
        return None
    finally:
        for pointer in alive.values():
            torch.cuda.caching_allocator_delete(pointer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
