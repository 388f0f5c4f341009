"""The Python API, a function for each question: the jobs of the command line, whose findings are returned."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.config.options import (
        CompareOptions,
        ExportOptions,
        FinetuneOptions,
        PlanOptions,
        ProfileOptions,
        SearchOptions,
        SimulateOptions,
    )
    from pipeline.jobs.export import Exported
    from pipeline.prediction.commands.three_steps import Inputs, MakeOptimizer, Model
    from pipeline.report.shown import (
        Compared,
        ComparedSimulations,
        Finetuned,
        Plan,
        Profiled,
        Searched,
        Simulated,
    )


def plan(*, log: bool = False, **settings: "Unpack[PlanOptions]") -> "Plan":
    """Return the predicted memory of every configuration on the cards `gpu`, as `fitproof plan` does.

    Settings have the names of the command line; a dotted one is given as a dictionary, causal_lm={"num_layers": 2}.
    A terminal or a notebook shows progress. With `log` the report is written to MLflow and to the folder `output`, as
    the command does.

    Raises:
        InvalidInputError: a setting is wrong, as for the command.

    """
    given, console = _started(settings)
    from pipeline.jobs.plan import log_plan, make_plan
    from pipeline.report.shown import Plan

    with _progress():
        findings = make_plan(given)
        if log:
            log_plan(findings, console)
    return Plan.of(findings)


def longest(**settings: "Unpack[PlanOptions]") -> "Plan":
    """Return the plan with the longest sequences that fit `gpu`, as `fitproof plan --sequence_length auto` does.

    The choice of each row has its `sequence_length`, and that of `recommended` the longest.

    Raises:
        InvalidInputError: a setting is wrong, as for the command.

    """
    from pipeline.base.errors import InvalidInputError

    length = settings.get("sequence_length", "auto")
    if length != "auto":
        raise InvalidInputError(f"longest finds sequence_length, and {length} is given; leave it out, or call plan")
    whole: Any = {**settings, "sequence_length": "auto"}
    return plan(**whole)


def search(**settings: "Unpack[SearchOptions]") -> "Searched":
    """Search for the fastest configuration, as `fitproof search` does, and return what was found.

    Trials run in processes of their own and are logged to MLflow. The answer is `best`, which is None if nothing that
    was measured fits; printing the result says so.

    Raises:
        InvalidInputError: a setting is wrong, as for the command, or nothing is predicted to fit.
        NothingMeasuredError: the search ended before a configuration was measured.

    """
    given, console = _started(settings)
    from pipeline.base.errors import NothingMeasuredError
    from pipeline.jobs.search import run_search
    from pipeline.report.shown import Searched

    with _progress():
        found = run_search(given, console)
    if found is None:
        raise NothingMeasuredError(
            "the search ended before a configuration was measured; raise search_time_limit or num_trials"
        )
    return Searched.of(found)


@overload
def finetune(*, gpu: str, log: bool = False, **settings: "Unpack[FinetuneOptions]") -> "Plan": ...
@overload
def finetune(**settings: "Unpack[FinetuneOptions]") -> "Finetuned": ...
def finetune(*, gpu: str | None = None, log: bool = False, **settings: "Unpack[FinetuneOptions]") -> "Plan | Finetuned":
    """Return which kinds of fine-tuning fit, as `fitproof finetune` does, and what was found of them.

    With `gpu` nothing is trained: the kinds are planned on these cards, and the plan is logged with `log` alone.
    Without, a short training of each kind is compared here, then the fastest configuration of one is searched, in
    processes of their own that are logged to MLflow.

    Raises:
        InvalidInputError: a setting is wrong, as for the command, or no kind can run.

    """
    given, console = _started(settings if gpu is None else {**settings, "gpu": gpu})
    from pipeline.jobs.finetune import make_plan_of_kinds, run_finetune
    from pipeline.jobs.plan import log_plan
    from pipeline.report.shown import Plan

    with _progress():
        if gpu is not None:
            planned = make_plan_of_kinds(given)
            if log:
                log_plan(planned, console)
            return Plan.of(planned)
        return run_finetune(given, console)


def profile(**settings: "Unpack[ProfileOptions]") -> "Profiled":
    """Train one configuration in a process of its own, and return where its memory and its time are.

    It is what `fitproof profiling` does, and is logged to MLflow.

    Raises:
        InvalidInputError: a setting is wrong, as for the command, or this machine cannot run the configuration.

    """
    given, console = _started(settings)
    from pipeline.jobs.profiling import run_profiling
    from pipeline.report.shown import Profiled

    with _progress():
        return Profiled.of(run_profiling(given, console))


def compare(*, log: bool = False, **settings: "Unpack[CompareOptions]") -> "Compared | ComparedSimulations":
    """Return MLflow's runs side by side, as `fitproof compare` does; simulations are compared with one another.

    With `log` the report is written to MLflow and to the folder `output`, as the command does.

    Raises:
        InvalidInputError: the settings select no run, or contradict each other.

    """
    from rich.console import Console

    from pipeline.config.given import validate
    from pipeline.jobs.compare import CompareSettings, compare_runs, log_comparison
    from pipeline.report.shown import Compared, ComparedSimulations
    from pipeline.report.simulations import SimulationComparison

    wanted = validate(CompareSettings, settings, "compare")
    with _progress():
        found = compare_runs(wanted)
        if log:
            log_comparison(found, wanted.output, Console(quiet=True))
    return ComparedSimulations.of(found) if isinstance(found, SimulationComparison) else Compared.of(found)


def export(**settings: "Unpack[ExportOptions]") -> "Exported":
    """Write the files that train a configuration in other frameworks, as `fitproof export` does, and return them.

    Raises:
        InvalidInputError: the configuration is wrong, or the folder cannot be written.

    """
    from pipeline.config.given import validate
    from pipeline.jobs.export import ExportSettings, write_export

    with _progress():
        return write_export(validate(ExportSettings, settings, "export"))


@contextmanager
def _progress() -> Iterator[None]:
    """Show progress on stderr in a terminal or a notebook."""
    from pipeline.base.progress import listening
    from pipeline.jobs.progress_bar import ProgressBar

    console = _console()
    if console.quiet:
        yield
        return
    with listening(ProgressBar(console)):
        yield


def _console() -> "Console":
    """Return stderr as a console, which shows nothing unless it is a terminal or a notebook."""
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    console.quiet = not (console.is_terminal or console.is_jupyter)
    return console


def _started(settings: Mapping[str, Any]) -> tuple[dict[str, Any], "Console"]:
    """Return the settings group by group and a console that shows nothing, while worker processes begin to load."""
    from rich.console import Console

    from pipeline.prediction.card_processes import start_importing

    gpu = settings.get("gpu")
    start_importing(gpu if isinstance(gpu, str) else "auto")  # anything else is refused later, by name
    from pipeline.config.given import nested

    return nested(settings), Console(quiet=True)


@overload
def simulate(*, command: str | Sequence[str], gpu: str, **settings: "Unpack[SimulateOptions]") -> "Simulated": ...
@overload
def simulate(
    function: Callable[..., object], /, *arguments: Any, gpu: str, **settings: "Unpack[SimulateOptions]"
) -> "Simulated": ...
@overload
def simulate(
    *, model: "Model", inputs: "Inputs", optimizer: "MakeOptimizer", gpu: str, **settings: "Unpack[SimulateOptions]"
) -> "Simulated": ...
def simulate(
    function: Callable[..., object] | None = None,
    /,
    *arguments: Any,
    gpu: str,
    command: str | Sequence[str] | None = None,
    model: Any = None,
    inputs: Any = None,
    optimizer: Any = None,
    **settings: "Unpack[SimulateOptions]",
) -> "Simulated":
    """Return what a training needs of a card, as `fitproof simulate` finds it on a simulated one; nothing is logged.

    The training is a command, a function with its arguments, or three optimizer steps of a model: `model` is a module
    (on the device meta it takes no memory here) or a callable that makes it, `inputs` a tensor, a tuple or a dictionary
    of what it is called with, and `optimizer` a class or callable of its parameters. The loss is the output's own, or
    the sum of the output. Functions run in a process of their own, which imports them by module and name, as those of
    multiprocessing do, or receives their code. Further settings have the names of the command line.

    Raises:
        InvalidInputError: a setting is wrong, a function cannot be sent, or the training uses no card.

    """
    import tempfile

    from pipeline.base.errors import InvalidInputError
    from pipeline.config.given import nested, validate
    from pipeline.jobs.simulate import SimulateSettings, run_simulation
    from pipeline.report.shown import Simulated
    from pipeline.simulation.call import command_of, name_of

    of_model = {"model": model, "inputs": inputs, "optimizer": optimizer}
    given = [
        name for name, value in {"function": function, "command": command, **of_model}.items() if value is not None
    ]
    if given not in (["function"], ["command"], list(of_model)):
        raise InvalidInputError(
            "simulate takes a command, or a function, or a model with its inputs and optimizer, and is given "
            f"{', '.join(given) or 'none of them'}; give one of the three"
        )
    if function is not None and not callable(function):
        raise InvalidInputError(
            f"the first argument of simulate is a function, and is {function!r}; give a command by name: command=..."
        )
    with tempfile.TemporaryDirectory(prefix="fitproof-") as folder:
        called: str | None = None
        if command is None:
            if function is None:
                from pipeline.prediction.commands.three_steps import three_steps

                function, arguments = three_steps, (model, inputs, optimizer)
                called = f"three optimizer steps of {name_of(model if hasattr(model, '__qualname__') else type(model))}"
            else:
                called = f"{name_of(function)}()"
            command = command_of(function, arguments, Path(folder))
        words = command if isinstance(command, str) else shlex.join(command)
        given_settings = nested({**settings, "gpu": gpu, "command": words})
        say = partial(_console().print, style="dim", highlight=False)
        found = run_simulation(validate(SimulateSettings, given_settings, "simulate"), Path(folder), say)
    return Simulated.of(found if called is None else replace(found, command=(), called=called))
