"""`fitproof main` on several machines: all train the same, the first one logs it, the others follow it."""

import json
from functools import partial
from pathlib import Path

from rich.console import Console

from pipeline.base.errors import InvalidInputError, differing
from pipeline.base.machines import this_machine
from pipeline.base.progress import progress
from pipeline.base.results import Outcome
from pipeline.config.experiment import Experiment
from pipeline.config.variants import EntryPoint
from pipeline.jobs.printing import say
from pipeline.runtime.environment import versions
from pipeline.runtime.run import execute
from pipeline.runtime.run_folder import folder_name
from pipeline.training.loop import train
from pipeline.training.saving import Saving, check_saved


def check_machines(experiment: Experiment) -> None:
    """Check that all machines have as many ranks, and train the same with the same versions.

    Raises:
        InvalidInputError: they do not.

    """
    machine, world_size = this_machine(), experiment.world_size
    if machine.is_alone:
        return
    if world_size % machine.count:
        raise InvalidInputError(
            f"each machine has as many ranks, and {machine.count} machines do not divide world_size {world_size}; set "
            f"--world_size to a multiple of {machine.count}"
        )
    own = {name: str(value) for name, value in {**experiment.params(), **versions()}.items()}
    with progress("waiting for the other machines"):
        first, *others = map(json.loads, machine.ask_all("settings", json.dumps(own)))
    for number, other in enumerate(others, 1):
        if names := differing(first, other):
            changes = "; ".join(
                f"{name} is {first.get(name)} and on machine {number} {other.get(name)}" for name in names
            )
            raise InvalidInputError(
                f"all machines of a training must run the same command with the same versions, and on machine 0 "
                f"{changes}; start the same on all"
            )


def agree_on_folder(own: Path | None, is_saved: bool) -> Path:
    """Return the folder of the run, which the first machine has made and tells the others.

    Raises:
        InvalidInputError: the training is saved, and a machine does not see the folder.

    """
    machine = this_machine()
    folder = Path(machine.ask_all("folder", str(own.resolve() if own else ""))[0])
    seen = machine.ask_all("view of the folder", str(folder.exists()))
    if is_saved and str(False) in seen:
        raise InvalidInputError(
            f"save_every needs a folder that all machines share, and machine {seen.index(str(False))} does not see "
            f"{folder}; set output to one that they share"
        )
    return folder


def follow(plan: EntryPoint, console: Console) -> int:
    """Train this machine's ranks of the only variant; the first machine logs it. Return 1 if they did not complete."""
    machine, [variant] = this_machine(), plan.variants
    if plan.resume:
        check_saved(plan.resume, variant.experiment)
    check_machines(variant.experiment)
    folder = agree_on_folder(None, plan.save_every is not None) / folder_name(variant.name)
    name, saving = (
        f"machine {machine.number} of {machine.count}",
        Saving(folder / "saved", plan.save_every, plan.resume),
    )
    log = folder / f"machine-{machine.number}.txt"
    with progress(f"{name}: training"):
        result = execute(variant.experiment, log, work=partial(train, saving=saving))
    say(console, f"{name}: {result.outcome}{f', {result.detail}' if result.detail else ''}; its output is in {log}")
    if result.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return 0 if result.outcome.completed else 1
