"""The events of a deep model from those of a shallow one: a recorded layer is repeated where its further layers are.

A layer is known by the first number in the name of a storage's module. What follows an event of one layer (the next
event, of the same layer or of another one) is the same for each repetition of it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pipeline.memory.timeline import IntArray, Origin, Span, Timeline
from pipeline.prediction.layers import Layers

INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number in a module's dotted name."""
Key = tuple[object, ...]
"""What an event is in its layer."""
NO_LAYER = -1


@dataclass(frozen=True, eq=False)
class Repetition:
    """The storages and events of a deep model, each a copy of one of the shallow model; N and E count the deep ones."""

    source_N: IntArray
    """The shallow model's storage of which each one is a copy."""
    layers: tuple[int | None, ...]
    """The layer of each storage; None if it belongs to no layer."""
    events_E: IntArray
    spans: tuple[Span, ...]

    def timeline(self, shallow: Timeline) -> Timeline:
        """Return the deep model's timeline from one of the shallow model with the same events; its work is missing."""
        numbers = self.source_N.tolist()
        return Timeline(
            num_bytes_N=shallow.num_bytes_N[self.source_N],
            shapes=tuple([shallow.shapes[number] for number in numbers]),
            origins=tuple(
                [_copied(shallow.origins[number], layer) for number, layer in zip(numbers, self.layers, strict=True)]
            ),
            events_E=self.events_E,
            spans=self.spans,
            work=(),
        )


@dataclass(frozen=True, eq=False)
class Recorded:
    """The events of a shallow model; E counts them."""

    events_E: IntArray
    layers: list[int | None]
    """The layer of each event."""
    keys: list[Key]
    """What each event is in its layer: the same for the same event of another layer."""
    ends: list[int]
    """The first event of another layer after each event."""
    numbers: dict[tuple[int | None, Key], int]
    """The number of each event, by its layer and key."""


def repetition_of(timeline: Timeline, layers: Layers) -> Repetition | None:
    """Return the events of the deep model; None if they do not follow from those of the shallow one."""
    modules = tuple([origin.module for origin in timeline.origins])
    operators = tuple([origin.operator for origin in timeline.origins])
    return _repetition(tuple(timeline.events_E.tolist()), timeline.spans, modules, operators, layers)


@lru_cache(maxsize=8)
def _repetition(
    events: tuple[int, ...],
    spans: tuple[Span, ...],
    modules: tuple[str, ...],
    operators: tuple[str, ...],
    layers: Layers,
) -> Repetition | None:
    recorded = _recorded(events, spans, modules, operators)
    try:
        parts = list(_walk(recorded, layers))
    except LookupError:
        return None
    event_M = np.concatenate([np.arange(begin, end) for begin, end, _ in parts])
    copies = [NO_LAYER if copy is None else copy for *_, copy in parts]
    copy_M = np.repeat(copies, [end - begin for begin, end, _ in parts])
    events_M = recorded.events_E[event_M]
    is_new_M = events_M >= 0
    storage_M, (new,) = np.where(is_new_M, events_M, -1 - events_M), np.nonzero(is_new_M)
    numbers = np.full((len(modules), layers.num_layers + layers.num_more + 1), -1)
    numbers[storage_M[new], copy_M[new]] = np.arange(len(new))
    number_M = numbers[storage_M, copy_M]
    released = number_M[~is_new_M]
    if (
        (released < 0).any()
        or len(np.unique(released)) != len(released)
        or not np.array_equal(number_M[new], np.arange(len(new)))
        or (new[released] > np.flatnonzero(~is_new_M)).any()
    ):
        return None
    begins = [np.flatnonzero(event_M == span.begin).tolist() for span in spans]
    if any(len(found) != 1 for found in begins):
        return None  # a phase that begins in a repeated layer
    return Repetition(
        source_N=storage_M[new],
        layers=tuple([None if copy == NO_LAYER else copy for copy in copy_M[new].tolist()]),
        events_E=np.where(is_new_M, number_M, -1 - number_M),
        spans=tuple(replace(span, begin=begin) for span, [begin] in zip(spans, begins, strict=True)),
    )


def _walk(recorded: Recorded, layers: Layers) -> Iterator[tuple[int, int, int | None]]:
    """Yield the deep model's events in their order, as ranges of the shallow model's and their layer in the deep one.

    Raises:
        LookupError: the order does not follow.

    """
    num_left = sum(1 if layer is None else layers.copies(layer) for layer in recorded.layers)
    begin, copy = 0, recorded.layers[0]
    while True:
        end = recorded.ends[begin]
        num_left -= end - begin
        if num_left < 0:
            raise LookupError
        yield begin, end, copy
        if end == len(recorded.layers):
            break
        copy, begin = layers.next(recorded.layers[end - 1], copy, recorded.layers[end]), end
        if copy is not None:
            if not 0 <= copy < layers.num_layers + layers.num_more:
                raise LookupError
            source = layers.source(copy)
            if source != recorded.layers[begin]:
                begin = recorded.numbers[source, recorded.keys[begin]]
    if num_left:
        raise LookupError


@lru_cache(maxsize=2)
def _recorded(
    events: tuple[int, ...], spans: tuple[Span, ...], modules: tuple[str, ...], operators: tuple[str, ...]
) -> Recorded:
    layer_of = _layers(events, spans, modules)
    keys = _keys(events, spans, modules, operators, layer_of)
    layers = [layer_of[event if event >= 0 else -1 - event] for event in events]
    ends = [len(events)] * len(events)
    for number in range(len(events) - 2, -1, -1):
        ends[number] = ends[number + 1] if layers[number] == layers[number + 1] else number + 1
    numbers = {place: number for number, place in enumerate(zip(layers, keys, strict=True))}
    return Recorded(np.array(events, np.int64), layers, keys, ends, numbers)


def _layers(events: tuple[int, ...], spans: tuple[Span, ...], modules: tuple[str, ...]) -> list[int | None]:
    """Return the layer of each storage.

    One of no module belongs to the layer whose storages are allocated before and after it, within a phase: autograd's
    own, such as a sum of gradients. While the model is loaded, one that is alive when a layer's storage is allocated
    belongs to that layer: the weight from which it is quantized.
    """
    layers = [_layer(module) for module in modules]
    begins = {span.begin: span.phase for span in spans}
    waiting: list[int] = []
    freed: set[int] = set()
    phase, before = "", None
    for number, event in enumerate(events):
        if number in begins:
            waiting, phase, before = [], begins[number], None
        if event < 0:
            freed.add(-1 - event)
            continue
        layer = layers[event]
        if layer is None:
            waiting.append(event)
            continue
        for other in waiting:
            if layer == before or (phase == "load" and other not in freed):
                layers[other] = layer
        waiting, before = [], layer
    return layers


def _keys(
    events: tuple[int, ...],
    spans: tuple[Span, ...],
    modules: tuple[str, ...],
    operators: tuple[str, ...],
    layers: list[int | None],
) -> list[Key]:
    """Return the key of each event."""
    begins = {span.begin: number for number, span in enumerate(spans)}
    counts: Counter[Key] = Counter()
    of_storage: dict[int, Key] = {}
    keys: list[Key] = []
    span = 0
    for number, event in enumerate(events):
        span = begins.get(number, span)
        if event >= 0:
            kind = span, layers[event], modules[event], operators[event]
            counts[kind] += 1
            of_storage[event] = (span, _in_layer(modules[event], 0), operators[event], counts[kind])
        keys.append((event >= 0, of_storage[event if event >= 0 else -1 - event]))
    return keys


@lru_cache(maxsize=4096)
def _layer(module: str) -> int | None:
    found = INDEX.search(module)
    return int(found.group()) if found else None


@lru_cache(maxsize=2**16)
def _copied(origin: Origin, layer: int | None) -> Origin:
    return origin if layer is None else origin._replace(module=_in_layer(origin.module, layer))


@lru_cache(maxsize=2**16)
def _in_layer(module: str, layer: int) -> str:
    """Return a module's name with that of a layer in place of its own."""
    return INDEX.sub(str(layer), module, count=1)
