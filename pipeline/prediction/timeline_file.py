"""Timelines as compressed JSON, with a row for each storage."""

import gzip
import json
from dataclasses import asdict, fields
from operator import attrgetter

import torch

from pipeline.memory.timeline import Lifetime, PhaseWork, Span, Timeline
from pipeline.memory.work import Work

NAMES = tuple(field.name for field in fields(Lifetime))
values_of = attrgetter(*NAMES)


def dump(timeline: Timeline) -> bytes:
    """Return the content of a timeline's file."""
    content = {
        "lifetimes": [[_plain(value) for value in values_of(lifetime)] for lifetime in timeline.lifetimes],
        "events": timeline.events,
        "seconds": [round(moment, 6) for moment in timeline.seconds],
        "spans": [asdict(span) for span in timeline.spans],
        "work": [asdict(phase) for phase in timeline.work],
    }
    return gzip.compress(json.dumps(content).encode(), compresslevel=1)


def load(content: bytes) -> Timeline:
    """Return the timeline of a file's content."""
    read = json.loads(gzip.decompress(content))
    return Timeline(
        lifetimes=tuple(_lifetime(dict(zip(NAMES, values, strict=True))) for values in read["lifetimes"]),
        events=tuple(read["events"]),
        seconds=tuple(read["seconds"]),
        spans=tuple(Span(**span) for span in read["spans"]),
        work=tuple(PhaseWork(**{**phase, "work": Work(**phase["work"])}) for phase in read["work"]),
    )


def _plain(value: object) -> object:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _lifetime(values: dict[str, object]) -> Lifetime:
    shape, dtype = values["shape"], getattr(torch, str(values["dtype"]))
    assert isinstance(shape, list)  # as JSON has it
    return Lifetime(**{**values, "shape": tuple(shape), "dtype": dtype})
