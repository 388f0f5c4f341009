"""Fitproof: the fastest way to train a model in the GPU memory you have, found and proven."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.prediction.longest import LongestFindings
    from pipeline.prediction.plan import PlanFindings
    from pipeline.searching.results import SearchFindings

# peft imports bitsandbytes, which says on a CPU that it has no kernel for inference.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def plan(*, log: bool = False, **settings: Any) -> "PlanFindings":
    """Return the predicted memory of every configuration on the cards `gpu`, as `fitproof plan` does, without output.

    Settings have the names of the command line; a dotted one is given as a dictionary, causal_lm={"num_layers": 2}.
    With `log` the report is written to MLflow and to the folder `output`, as the command does.

    Raises:
        InvalidInputError: a setting is wrong, as for the command.

    """
    from rich.console import Console

    from pipeline.runtime.fork_server import start_server

    start_server()  # it imports torch and transformers while this process does the same
    from pipeline.config.settings import nested
    from pipeline.jobs.plan import log_plan, make_plan

    given, console = nested(settings), Console(quiet=True)
    findings = make_plan(given, console)
    if log:
        log_plan(findings, given, console)
    return findings


def longest(**settings: Any) -> "LongestFindings":
    """Return the longest sequences that fit the cards `gpu`, as `fitproof plan --sequence_length auto` does.

    Raises:
        InvalidInputError: a setting is wrong, as for the command.

    """
    from rich.console import Console

    from pipeline.runtime.fork_server import start_server

    start_server()  # it imports torch and transformers while this process does the same
    from pipeline.config.settings import nested
    from pipeline.jobs.longest import find_longest

    return find_longest(nested(settings), Console(quiet=True))


def search(**settings: Any) -> "SearchFindings | None":
    """Search for the fastest configuration, as `fitproof search` does, without output; return what was found.

    Trials run in processes of their own and are logged to MLflow. The result is None if nothing was measured.

    Raises:
        InvalidInputError: a setting is wrong, as for the command.

    """
    from rich.console import Console

    from pipeline.config.settings import nested
    from pipeline.jobs.search import run_search

    return run_search(nested(settings), Console(quiet=True))
