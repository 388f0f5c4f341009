"""Timelines as compressed JSON; the origins, of which many storages have the same, are written once."""

import gzip
import json
from dataclasses import asdict

import numpy as np
import torch

from pipeline.memory.timeline import Origin, PhaseWork, Span, Timeline
from pipeline.memory.work import Work


def dump(timeline: Timeline) -> bytes:
    """Return the content of a timeline's file."""
    distinct = {origin: number for number, origin in enumerate(dict.fromkeys(timeline.origins))}
    content = {
        "num_bytes": timeline.num_bytes_N.tolist(),
        "shapes": list(timeline.shapes),
        "distinct_origins": [[str(dtype).removeprefix("torch."), *names] for dtype, *names in distinct],
        "origins": [distinct[origin] for origin in timeline.origins],
        "events": timeline.events_E.tolist(),
        "spans": [asdict(span) for span in timeline.spans],
        "work": [asdict(phase) for phase in timeline.work],
        "storage_work": {kind: amounts_N.tolist() for kind, amounts_N in timeline.storage_work.items()},
    }
    return gzip.compress(json.dumps(content).encode(), compresslevel=1)


def load(content: bytes) -> Timeline:
    """Return the timeline of a file's content."""
    read = json.loads(gzip.decompress(content))
    distinct = [Origin(getattr(torch, dtype), *names) for dtype, *names in read["distinct_origins"]]
    return Timeline(
        num_bytes_N=np.array(read["num_bytes"], np.int64),
        shapes=tuple(map(tuple, read["shapes"])),
        origins=tuple(distinct[number] for number in read["origins"]),
        events_E=np.array(read["events"], np.int64),
        spans=tuple(Span(**span) for span in read["spans"]),
        work=tuple(PhaseWork(**{**phase, "work": Work(**phase["work"])}) for phase in read["work"]),
        storage_work={kind: np.array(amounts, np.int64) for kind, amounts in read["storage_work"].items()},
    )
