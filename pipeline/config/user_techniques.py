"""Techniques outside the package.

The environment variable FITPROOF_TECHNIQUES names their modules, separated by commas, each with one subclass of
Technique. Modules are found on Python's path and in the current folder:

    FITPROOF_TECHNIQUES=my_techniques.eight_bit,recomputed_mlp fitproof search ...

The variable is read when Fitproof is imported; worker processes inherit it.
"""

import os

from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Technique
from pipeline.base.user_functions import classes_in, import_user_module

VARIABLE = "FITPROOF_TECHNIQUES"
EARLIER = {
    *("conflict", "unsupported", "unsuited", "needs_layers", "on_host", "on_optimizer", "note", "not_predicted"),
    *("resolved", "task", "within_layers", "size_thresholds", "num_chunks", "layer_period", "layer_reach"),
}
"""Names that the contract of a technique had in earlier versions."""


def user_techniques() -> dict[str, type[Technique]]:
    """Return the technique of each module that FITPROOF_TECHNIQUES names, by the last part of the module's name.

    Raises:
        InvalidInputError: a module cannot be imported, or does not define one technique of the contract as it is.

    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    return {name.rpartition(".")[2]: _technique_of(name) for name in names}


def is_user_technique(technique: type[Technique]) -> bool:
    """Whether a technique is defined outside the package."""
    return not technique.__module__.startswith("pipeline.")


def _technique_of(name: str) -> type[Technique]:
    module = import_user_module(name, f"{VARIABLE}={name}", "a module", "path.to.module")
    found = classes_in(module, Technique)  # type: ignore[type-abstract]
    if len(found) != 1:
        raise InvalidInputError(
            f"a module of {VARIABLE} must define one subclass of pipeline.base.technique.Technique, and {name} defines "
            f"{len(found)}; put each technique into a file of its own"
        )
    [technique] = found
    if earlier := sorted(EARLIER & {*dir(technique)} - {*technique.model_fields}):
        raise InvalidInputError(
            f"a technique follows the contract in docs/architecture.md, and {name} has {', '.join(earlier)} of an "
            "earlier one, which nothing reads any more; CHANGELOG.md says what takes its place"
        )
    return technique
