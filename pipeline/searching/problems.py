"""The problem of a search by its settings: of a command if they name one, else of Fitproof's own training."""

from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.searching.command_problem import make_command_problem
from pipeline.searching.interface import Problem
from pipeline.searching.problem import make_problem
from pipeline.searching.settings import CommandSettings


def problem_of(given: Mapping[str, Any]) -> Problem:
    """Return the problem, every configuration of its space checked.

    Raises:
        InvalidInputError: a setting, a dimension or one of its values is wrong.

    """
    if given.get("command") is not None:
        return make_command_problem(given)
    if alone := [name for name in CommandSettings.model_fields if name in given]:
        raise InvalidInputError(
            f"{alone[0]} belongs to a search of a command, and there is none; write it behind --: fitproof search "
            "--effective_batch_size 64 -- python train.py --batch {micro_batch_size}"
        )
    return make_problem(given)
