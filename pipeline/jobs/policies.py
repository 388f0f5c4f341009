"""Explicit checkpointing policies for all variants of an entry point, before the first one runs."""

from dataclasses import replace
from typing import Any

from pipeline.config.variants import EntryPoint, Variant


def with_policies(plan: EntryPoint) -> EntryPoint:
    """Return the entry point with the policies that a prediction chooses in place of `checkpointing=auto`.

    Raises:
        InvalidInputError: as pipeline.planning.checkpointing_policy.resolved().

    """
    comparisons = [replace(each, variants=tuple(map(_with_policy, each.variants))) for each in plan.comparisons]
    return replace(plan, comparisons=tuple(comparisons))


def _with_policy(variant: Variant) -> Variant:
    settings: Any = variant.experiment.settings
    if variant.skipped or (settings.checkpointing != "auto" and ":" not in settings.checkpointing):
        return variant
    from pipeline.planning.checkpointing_policy import resolved  # takes a second, which few runs need

    return replace(variant, experiment=resolved(variant.experiment))
