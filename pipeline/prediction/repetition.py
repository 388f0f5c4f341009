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
Place = tuple[int, int | None]
"""The index of a storage or of an event in the shallow timeline, and its layer in the deep model."""


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
    try:
        order = list(_walk(events, spans, modules, operators, layers))
    except LookupError:
        return None
    numbers: dict[Place, int] = {}
    released: set[Place] = set()
    repeated: list[int] = []
    for event, layer in order:
        storage = events[event]
        if storage >= 0:
            numbers[storage, layer] = len(numbers)
            repeated.append(numbers[storage, layer])
        else:
            place = -1 - storage, layer
            if place not in numbers or place in released:
                return None
            released.add(place)
            repeated.append(-1 - numbers[place])
    places: dict[int, list[int]] = {span.begin: [] for span in spans}
    for at, (event, _) in enumerate(order):
        if event in places:
            places[event].append(at)
    if any(len(found) != 1 for found in places.values()):
        return None  # a phase that begins in a repeated layer
    return Repetition(
        source_N=np.array([storage for storage, _ in numbers], np.int64),
        layers=tuple([layer for _, layer in numbers]),
        events_E=np.array(repeated, np.int64),
        spans=tuple(replace(span, begin=places[span.begin][0]) for span in spans),
    )


def _walk(
    events: tuple[int, ...],
    spans: tuple[Span, ...],
    modules: tuple[str, ...],
    operators: tuple[str, ...],
    layers: Layers,
) -> Iterator[Place]:
    """Yield the deep model's events in their order; raise LookupError where the order does not follow."""
    layer_of = _layers(events, spans, modules)
    keys = _keys(events, spans, modules, operators, layer_of)
    layer_of_event = [layer_of[event if event >= 0 else -1 - event] for event in events]
    found = {(layer, key): number for number, (layer, key) in enumerate(zip(layer_of_event, keys, strict=True))}
    total = sum(1 if layer is None else layers.copies(layer) for layer in layer_of_event)
    seen: set[Place] = set()
    event, copy = 0, layer_of_event[0]
    while True:
        if (event, copy) in seen:
            raise LookupError
        seen.add((event, copy))
        yield event, copy
        if event + 1 == len(events):
            break
        copy = layers.next(layer_of_event[event], copy, layer_of_event[event + 1])
        event += 1
        if copy is not None:
            if not 0 <= copy < layers.num_layers + layers.num_more:
                raise LookupError
            source = layers.source(copy)
            if source != layer_of_event[event]:
                event = found[source, keys[event]]
    if len(seen) != total:
        raise LookupError


def _layers(events: tuple[int, ...], spans: tuple[Span, ...], modules: tuple[str, ...]) -> list[int | None]:
    """Return the layer of each storage.

    One of no module belongs to the layer whose storages are allocated before and after it, within a phase: autograd's
    own, such as a sum of gradients.
    """
    layers = [_layer(module) for module in modules]
    begins = {span.begin for span in spans}
    waiting: list[int] = []
    before = None
    for number, event in enumerate(events):
        if number in begins:
            waiting, before = [], None
        if event < 0:
            continue
        layer = layers[event]
        if layer is None:
            waiting.append(event)
            continue
        if layer == before:
            for other in waiting:
                layers[other] = layer
        waiting, before = [], layer
    return layers


def _keys(
    events: tuple[int, ...],
    spans: tuple[Span, ...],
    modules: tuple[str, ...],
    operators: tuple[str, ...],
    layers: list[int | None],
) -> list[tuple[object, ...]]:
    """Return for each event what it is in its layer: the same for the same event of another layer."""
    begins = {span.begin: number for number, span in enumerate(spans)}
    counts: Counter[tuple[object, ...]] = Counter()
    of_storage: dict[int, tuple[object, ...]] = {}
    keys: list[tuple[object, ...]] = []
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
