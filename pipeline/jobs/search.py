"""A job: look ahead at a space, choose trials and run them, check which is the fastest that fits, and say so."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.runtime.fork_server import loading, start_server
from pipeline.searching.ahead import make_sampler
from pipeline.searching.problem import make_problem

if TYPE_CHECKING:
    from pipeline.searching.results import SearchFindings


def search(given: Mapping[str, Any], console: Console) -> int:
    """Search, print and log the answer; return the exit code: 1 where nothing fits the budget."""
    findings = find(given, console)
    return 1 if findings is None or findings.best is None else 0


def find(given: Mapping[str, Any], console: Console) -> "SearchFindings | None":
    """Search, print and log the answer, and return what was found; None where nothing was measured.

    What the rest needs, MLflow first of all, is loaded while other processes predict.

    Raises:
        InvalidInputError: a setting is wrong, or nothing is predicted to fit the budget.

    """
    start_server()
    plan = make_problem(given)
    for note in plan.notes:
        console.print(note, highlight=False)
    words = f"looking ahead at {len(plan.space.choices)} configurations"
    with console.status(words), loading("pipeline.searching.conduct"):
        sampler = make_sampler(plan)
    from pipeline.searching.conduct import conduct

    return conduct(plan, sampler, console)
