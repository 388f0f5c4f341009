"""The space of a command: the values of its placeholders, which of them go together, and the command of each choice."""

import json
import re
import shlex
from collections.abc import Sequence

import torch

from pipeline.base.errors import InvalidInputError, close_to, did_you_mean
from pipeline.base.units import divisors
from pipeline.config.command import ACCUMULATION, EFFECTIVE_BATCH, WORLD_SIZE, Command
from pipeline.config.command_template import Template
from pipeline.config.known_command import Lever, scripts_of
from pipeline.config.space import MICRO_BATCH, Choice, Value, size_of, why_not_included
from pipeline.searching.settings import CommandSearchSettings

DERIVED = (ACCUMULATION, EFFECTIVE_BATCH)
"""Placeholders that follow from others."""
WITHOUT_VALUES = (MICRO_BATCH, *DERIVED, WORLD_SIZE)
"""Placeholders that need no values of the user's."""
OPTION = re.compile(r"[\"'](--[A-Za-z][\w-]*)[\"']")
"""An option in the source of a script."""
MOST_OPTIONS = 20


def dimensions_of(settings: CommandSearchSettings, template: Template) -> dict[str, tuple[Value, ...]]:
    """Return the values of each placeholder that has several.

    Raises:
        InvalidInputError: there is no placeholder, or one without values.

    """
    placeholders = template.placeholders
    if not placeholders:
        raise InvalidInputError(_nothing_to_search(template))
    if unknown := [name for name in settings.space if name not in placeholders or name in DERIVED]:
        known = ", ".join(name for name in (*placeholders, *template.levers) if name not in DERIVED)
        raise InvalidInputError(
            f"space has values of the command's placeholders, and {{{unknown[0]}}} is none of them; they are: {known}"
        )
    dimensions: dict[str, tuple[Value, ...]] = {}
    for name, values in placeholders.items():
        given = settings.space.get(name, "divisors" if name == MICRO_BATCH and not values else values)
        if given == "divisors" and name == MICRO_BATCH:
            dimensions[name] = divisors(settings.effective_batch_size)
        elif isinstance(given, str) or (not given and name not in (*DERIVED, WORLD_SIZE)):
            close = [f"{{{one}}}" for one in close_to(name, WITHOUT_VALUES, most=1)]
            known = did_you_mean(close, f"known without are {', '.join(WITHOUT_VALUES)}")
            raise InvalidInputError(
                f"the placeholder {{{name}}} needs values; write them as {{{name}:first,second}}, or as "
                f"--space '{json.dumps({name: ['first', 'second']})}'; {known}"
            )
        elif given:
            dimensions[name] = tuple(given)
    numbers = [name for name in (MICRO_BATCH, WORLD_SIZE) if name in dimensions]
    return dimensions | {name: _whole_numbers(name, dimensions[name]) for name in numbers}


def _whole_numbers(name: str, values: Sequence[Value]) -> tuple[Value, ...]:
    if odd := [value for value in values if not str(value).isdecimal() or not int(str(value))]:
        raise InvalidInputError(f"{{{name}}} takes whole numbers from 1 on, and has {odd[0]!r}; remove it")
    return tuple(int(str(value)) for value in values)


def _nothing_to_search(template: Template) -> str:
    options = dict.fromkeys(match[1] for script in scripts_of(template.words) for match in OPTION.finditer(script))
    named = f"; its script names {', '.join([*options][:MOST_OPTIONS])}" if options else ""
    return (
        f"a search of a command needs a placeholder in it, and this has none: {shlex.join(template.words)}; "
        "write {micro_batch_size} and {accumulation_steps} where it takes them, {dtype:fp32,bf16} for values of your "
        f"own, or {{--flag}} for an option that is there or not{named}"
    )


def world_size_of(settings: CommandSearchSettings, template: Template, choice: Choice) -> int:
    """Return how many processes train together."""
    if WORLD_SIZE in choice:
        return int(str(choice[WORLD_SIZE]))
    return settings.world_size or template.num_processes or 1


def why_refused(settings: CommandSearchSettings, template: Template, choice: Choice) -> str | None:
    """Return why a configuration is not in the space: its training, or its effective batch, would be another."""
    for name, lever in template.levers.items():
        reason = why_not_included(settings.mathematics, f"{name}={choice.get(name)}", lever.mathematics)
        if reason and changes_training(lever, choice):
            return reason
    parallel = size_of(choice) * (world_size := world_size_of(settings, template, choice))
    if not parallel or settings.effective_batch_size % parallel == 0:
        return None
    of_each = f"micro_batch_size={size_of(choice)} in each of {world_size} processes"
    return f"{of_each} does not divide the effective batch of {settings.effective_batch_size}"


def changes_training(lever: Lever, choice: Choice) -> bool:
    """Whether a configuration has another value of a lever than the plain one."""
    return lever.name in choice and choice[lever.name] != lever.values[0]


def command_of(
    settings: CommandSearchSettings, template: Template, choice: Choice, device: torch.device, budget_bytes: int | None
) -> Command:
    """Return the command of a configuration.

    Raises:
        InvalidInputError: a placeholder that follows from others is there without them.

    """
    world_size = world_size_of(settings, template, choice)
    values = {EFFECTIVE_BATCH: settings.effective_batch_size, WORLD_SIZE: world_size, **choice}
    if MICRO_BATCH in choice:
        values.setdefault(ACCUMULATION, settings.effective_batch_size // (size_of(choice) * world_size))
    elif ACCUMULATION in template.placeholders:
        raise InvalidInputError("{accumulation_steps} follows from {micro_batch_size}, which is missing; add it")
    return Command(
        words=template.words_with(values),
        files=template.files_with(values),
        environment=template.environment_with(values),
        choice=choice,
        device=device,
        effective_batch_size=settings.effective_batch_size,
        micro_batch_size=size_of(choice) or None,
        world_size=world_size,
        budget_bytes=budget_bytes,
        num_steps=settings.num_steps,
        timing_warmup_steps=settings.timing_warmup_steps,
        time_limit=settings.time_limit,
    )
