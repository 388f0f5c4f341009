"""Recordings of real memory: converted to events, and replayed to the statistics of a GPU."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recordings import Allocation, EmptyCache, Free, events_of, replay
from test_allocator import BOTH, CAP_BYTES, program

from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    """Return an entry of a trace, as torch writes it."""
    where = {"device_free": address} if action == "oom" else {"addr": address}
    return {"action": action, **where, "size": size, "stream": stream, "time_us": 0, "frames": [], "pool_id": (0, 0)}


def segment(address: int, *blocks: tuple[int, int, str], device: int = 0) -> dict[str, Any]:
    """Return a segment of blocks (size, requested size, state), as torch writes it."""
    starts = [address + sum(size for size, _, _ in blocks[:index]) for index in range(len(blocks))]
    return {
        "device": device,
        "address": address,
        "total_size": sum(size for size, _, _ in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {"address": start, "size": size, "requested_size": requested, "state": state, "frames": []}
            for start, (size, requested, state) in zip(starts, blocks, strict=True)
        ],
    }


SNAPSHOT: dict[str, Any] = {
    "segments": [
        segment(0x7000_0000, (12 * MIB, 12 * MIB - 5, "active_allocated")),
        segment(0x9000_0000, (30 * MIB, 30 * MIB, "active_allocated")),
        segment(0xB000_0000, (3 * MIB, 3 * MIB, "active_pending_free"), (17 * MIB, 0, "inactive")),
        segment(0xD000_0000, (50 * MIB, 50 * MIB, "active_allocated"), device=1),
    ],
    "device_traces": [
        [
            entry("free_requested", 0x8000_0000, 14 * MIB),
            entry("free_completed", 0x8000_0000, 14 * MIB),
            entry("segment_free", 0x8000_0000, 14 * MIB),
            entry("segment_free", 0x8800_0000, 2 * MIB),
            entry("oom", 512 * MIB, 900 * MIB),
            entry("segment_alloc", 0xB000_0000, 20 * MIB),
            entry("alloc", 0xB000_0000, 2 * MIB + 1),
            entry("free_requested", 0xB000_0000, 2 * MIB + 1),
            entry("free_completed", 0xB000_0000, 2 * MIB + 1),
            entry("alloc", 0xB000_0000, 3 * MIB),
            entry("segment_alloc", 0x9000_0000, 30 * MIB, 7),
            entry("free_requested", 0xB000_0000, 3 * MIB),
            entry("alloc", 0x9000_0000, 30 * MIB, 7),
            entry("snapshot", 0, 45 * MIB),
        ],
        [],
    ],
}


def test_a_recording_becomes_events() -> None:
    assert events_of(SNAPSHOT) == [
        Allocation(4, 12 * MIB - 5),  # alive before: only among the segments
        Allocation(0, 14 * MIB),  # alive before: freed in the recording
        Free(0),
        EmptyCache(),
        Allocation(1, 2 * MIB + 1, 0, 0xB000_0000),
        Free(1),
        Allocation(2, 3 * MIB),
        Allocation(3, 30 * MIB, 7, 0x9000_0000),
    ]
    assert events_of(SNAPSHOT, 1) == [Allocation(0, 50 * MIB)]


def test_a_recording_is_replayed() -> None:
    peaks = replay(events_of(SNAPSHOT))
    assert peaks.peak_allocated_bytes == (12 + 3 + 30) * MIB
    assert peaks.peak_reserved_bytes == (12 + 20 + 30) * MIB  # the 14 went before the 20 came
    assert replay(events_of(SNAPSHOT), expandable_segments=True).peak_reserved_bytes == (20 + 40) * MIB


def test_a_recording_without_frees_is_refused() -> None:
    trace = [e for e in SNAPSHOT["device_traces"][0] if e["action"] != "free_completed"]
    with pytest.raises(InvalidInputError, match="0xb0000000 is missing; record without skip_actions"):
        events_of({**SNAPSHOT, "device_traces": [trace]})


def test_a_recording_with_private_pools_is_refused() -> None:
    private = {**segment(0x1000_0000), "segment_pool_id": (0, 1)}
    with pytest.raises(InvalidInputError, match="without CUDA graphs"):
        events_of({**SNAPSHOT, "segments": [private]})


RECORD = """
import json, pickle, sys, torch
steps, cap_bytes, file = json.load(sys.stdin), json.loads(sys.argv[1]), sys.argv[2]
torch.cuda.init()
total = torch.cuda.mem_get_info()[1]
if cap_bytes:
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total)
torch.cuda.memory._record_memory_history(context=None)
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
live = {}
for number, size, stream in steps:
    if size:
        with torch.cuda.stream(streams[stream]):
            live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
    else:
        del live[number]
stats = torch.cuda.memory_stats()
answer = {
    "snapshot": torch.cuda.memory._snapshot(),
    "allocated": stats["allocated_bytes.all.peak"],
    "reserved": stats["reserved_bytes.all.peak"],
    "retries": stats["num_alloc_retries"],
    "cap_bytes": int(cap_bytes / total * total) if cap_bytes else None,
}
with open(file, "wb") as out:
    pickle.dump(answer, out)
"""


@pytest.mark.gpu
@pytest.mark.every_card
@BOTH
@pytest.mark.parametrize("cap_bytes", [None, CAP_BYTES], ids=["free", "capped"])
@pytest.mark.parametrize("seed", [2, 8])
def test_a_recording_of_a_gpu_replays_to_its_statistics(
    seed: int, cap_bytes: int | None, expandable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    steps = json.dumps(list(program(seed)))
    command = [sys.executable, "-c", RECORD, json.dumps(cap_bytes), str(tmp_path / "answer")]
    subprocess.run(command, input=steps, text=True, check=True)
    with (tmp_path / "answer").open("rb") as file:
        answer = pickle.load(file)
    # A release at the cap is recorded like a call of empty_cache(); the replay is to come to it by itself.
    events = [event for event in events_of(answer["snapshot"]) if not isinstance(event, EmptyCache)]
    assert len(events) == len(json.loads(steps))
    peaks = replay(events, cap_bytes=answer["cap_bytes"], expandable_segments=expandable)
    assert peaks.peak_allocated_bytes == answer["allocated"]
    assert peaks.peak_reserved_bytes == answer["reserved"]
    assert peaks.num_alloc_retries == answer["retries"]
