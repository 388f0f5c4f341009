"""Headroom: the fastest way to train a model in the memory you have, found and proven.

Floors; a module imports only from floors below its own, and the members of a family do not know each other:

    cli  tools                      the command line; what trains nothing
    measure  profiling  searching/  jobs: variants against a baseline; one run looked at; a search in a budget (Optuna)
    compare  planning/              jobs that train nothing: runs of MLflow beside each other; what would fit which card
    publish                         a finished job's report to its readers
    tracking/  report/              Results -> MLflow runs (MLflow); Results -> tables, pictures and a page (matplotlib)
    handover/                       an Experiment -> the files by which other frameworks train the same
    execute  predict                an Experiment in a clean process -> Result; on fake tensors -> Prediction
    trace  context                  an Experiment on fake tensors -> what would live when; what the CUDA context takes
    profile                         looking closely at one run: tensors and operators
    train                           the loop around the one training step
    step  variants  environment     the step itself; an entry point's YAML -> its variants; what figures depend on
    space                           the configurations that a search or a plan chooses from
    experiment                      settings -> one Experiment, resolved and checked
    settings                        every setting: name, type, default, meaning, and the errors of a wrong one
    techniques/  models/  data/     one file each, found by its name
    text  simulation/               documents -> tokens, once; tensors without numbers that live as real ones do
    sequences  memory/  metrics     tokens -> sequences; budgets, meters, allocator; Result -> figures
    user_code                       functions of the user's own, named as path.to.module:function
    owner                           which process something belongs to, and whether it is gone
    crew  interruption              processes that work on many things side by side; what Ctrl-C does to a command
    processes  loading  files       fresh processes, and what they have loaded; where files are kept, and how written
    entries                         the names of the entry points
    contracts                       the shapes that all floors agree on
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.prediction.plan import PlanFindings
    from pipeline.searching.results import SearchFindings


def plan(*, log: bool = False, **settings: Any) -> "PlanFindings":
    """Return what every configuration would need on the cards `gpu`: `python -m pipeline plan`, silently.

    Settings have the names of the command line; a dotted one is given as a dictionary, causal_lm={"num_layers": 2}.
    With `log` the report goes to MLflow and to the folder `output`, as the command's does.

    Raises:
        InvalidInputError: as the command refuses it.

    """
    from rich.console import Console

    from pipeline.config.settings import nested
    from pipeline.jobs.plan import find, log_plan

    given, console = nested(settings), Console(quiet=True)
    findings = find(given, console)
    if log:
        log_plan(findings, given, console)
    return findings


def search(**settings: Any) -> "SearchFindings | None":
    """Return what a search for the fastest configuration found: `python -m pipeline search`, silently.

    It runs trials in processes of their own, and logs to MLflow as the command does. None where nothing was measured.

    Raises:
        InvalidInputError: as the command refuses it.

    """
    from rich.console import Console

    from pipeline.config.settings import nested
    from pipeline.jobs.search import run_search

    return run_search(nested(settings), Console(quiet=True))
