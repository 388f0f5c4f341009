"""The entry point `finetune`: the kinds of fine-tuning that fit a budget, compared, and a search within one of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveInt
from rich.console import Console

from pipeline.base.errors import InvalidInputError
from pipeline.base.settings import Settings
from pipeline.base.units import MIB
from pipeline.config.entry_points import SPACES, yaml_file
from pipeline.config.experiment import Experiment, family_of, make_experiment
from pipeline.config.given import dotted, merged, nested, split_off
from pipeline.config.settings import MODELS
from pipeline.config.space import FOLLOWING
from pipeline.config.variants import EntryPoint, Variant, read_config, read_yaml
from pipeline.jobs.comparison import run_comparison
from pipeline.jobs.finetune_plan import KindsOnCardsSettings, plan_each, plan_kinds
from pipeline.jobs.plan import log_plan, make_plan
from pipeline.jobs.printing import say
from pipeline.jobs.search import run_search
from pipeline.memory.device import find_device, hardware_of
from pipeline.planning.plan import CardPlan, PlanFindings
from pipeline.searching.experiment_problem import automatic_budget
from pipeline.searching.settings import SearchSettings

if TYPE_CHECKING:
    from pipeline.report.shown import Finetuned

ENTRY = "finetune"
AUTO_KIND = "auto"
"""The first kind that fits the budget."""
IN_SHARED = {"budget", "config"}
"""Settings of the search that the settings of all kinds have already."""
LENGTH = ("num_steps", "eval_steps")
"""Settings that the compared runs have their own values of."""
SMALLEST: Mapping[str, Any] = {"micro_batch_size": 1}
"""The configuration that stands for a kind that has no plan."""


class FinetuneSettings(KindsOnCardsSettings, SearchSettings):
    """The settings that `finetune` adds to those of a run."""

    kind: str = AUTO_KIND
    """The kind of fine-tuning to search: one of those in finetune.yaml; auto: the first that fits the budget."""


class ComparedSettings(Settings):
    """How the kinds are compared."""

    space: dict[str, Any] = Field(min_length=1)
    """The space of which each kind runs the configuration that fits and is expected to be the fastest."""
    num_steps: PositiveInt
    """Optimizer steps of each run."""
    eval_steps: PositiveInt
    """Held-out batches of each run."""
    sections: tuple[str, ...] = ()
    """Sections that are added to the report: names of files in report/sections/."""


class KindsSettings(Settings):
    """The keys of finetune.yaml besides the settings that all kinds share."""

    kinds: dict[str, dict[str, Any]] = Field(min_length=1)
    """The settings of each kind by its name, the least changed training first."""
    compared: ComparedSettings


Planned = CardPlan | str
"""The plan of a kind on this device, or why the device, the packages or the model support no configuration of it."""


def finetune(given: Mapping[str, Any], console: Console) -> int:
    """Compare the kinds that fit, then search one; return the exit code: 1 if none fits or the search finds nothing.

    With `gpu` nothing is trained: the kinds are planned on these cards.
    """
    if given.get("gpu") not in (None, "none"):
        return 0 if log_plan(make_plan_of_kinds(given), console) else 1
    found = run_finetune(given, console).searched
    return 1 if found is None or found.best is None else 0


def make_plan_of_kinds(given: Mapping[str, Any]) -> PlanFindings:
    """Return which kinds fit the cards `gpu`; show progress only, and log nothing.

    Raises:
        InvalidInputError: a setting or a card is wrong, or no kind can be planned.

    """
    own, asked, settings, _ = _read(given)
    kinds = {name: settings for name, settings in own.kinds.items() if asked.kind in (AUTO_KIND, name)}
    shared = _shared(settings, given)
    if shared.get("budget") in (None, "auto", "none"):  # all of each card
        shared.pop("budget", None)
    return plan_kinds(kinds, own.compared.space, shared, asked, given)


def run_finetune(given: Mapping[str, Any], console: Console) -> "Finetuned":
    """Compare the kinds that fit, then search one; print and log both, and return what was found.

    Raises:
        InvalidInputError: a setting is wrong, no kind can run here, the weights of each exceed the budget, or a storage
            cannot be reached.

    """
    own, asked, settings, length = _read(given)
    shared = _shared(settings, given)
    shared["budget"] = _budget(shared, console)
    experiments = {name: _experiment(own, shared, settings, SMALLEST) for name, settings in own.kinds.items()}
    if asked.kind != AUTO_KIND:
        _check_kind(experiments[asked.kind], own.kinds[asked.kind])
    first = next(iter(experiments.values()))
    first.prepare()  # what is wrong with data or weights is said before anything is predicted
    here = {"gpu": str(find_device(str(shared.get("device", "auto")))), "space": own.compared.space}
    plans, reasons = plan_each(own.kinds, shared, lambda values: make_plan({**values, **here}))
    planned = {name: plans[name].cards[0] if name in plans else str(reasons[name]) for name in own.kinds}
    compared = run_comparison(_comparison(own, shared, planned), console)
    fitting = [name for name, plan in planned.items() if _skipped(plan) is None]
    chosen = next(iter(fitting), None) if asked.kind == AUTO_KIND else asked.kind
    found = None
    if chosen is not None:
        say(console, f"searching the fastest configuration of the kind {chosen}")
        of_search = SearchSettings.model_fields.keys() - IN_SHARED
        values = {**shared, **{name: value for name, value in given.items() if name in of_search}}
        found = run_search(merged(merged(length, values), nested(own.kinds[chosen])), console)
    from pipeline.report.shown import Compared, Finetuned, Searched  # imported after the runs

    return Finetuned(
        kinds=Compared.of(compared),
        kind=chosen,
        searched=None if found is None else Searched.of(found),
    )


def _read(given: Mapping[str, Any]) -> tuple[KindsSettings, FinetuneSettings, dict[str, Any], dict[str, Any]]:
    """Return the kinds, what is asked for, the settings that all share, and those of the search's length alone."""
    own, values = split_off(KindsSettings, read_yaml(yaml_file(ENTRY)), ENTRY)
    # a search without a space of the user's has that of search.yaml
    asked, _ = split_off(FinetuneSettings, {"space": own.compared.space, **given}, ENTRY)
    _check(own, asked.kind, given)
    of_config = _of_config(own, given)
    length = {name: of_config.pop(name) for name in LENGTH if name in of_config}
    return own, asked, merged(nested(values), of_config), length


def _check(own: KindsSettings, asked: str, given: Mapping[str, Any]) -> None:
    """Refuse a kind that there is not, and settings that the kinds themselves set."""
    names = ", ".join(own.kinds)
    if asked not in (AUTO_KIND, *own.kinds):
        raise InvalidInputError(f"kind must be {AUTO_KIND} or one of {names}, and is {asked!r}; set one of them")
    of_kinds = {name for settings in own.kinds.values() for name, _ in dotted(settings)}
    space = given.get("space")
    for name, value in (*dotted(given), *(space.items() if isinstance(space, Mapping) else ())):
        if name in of_kinds:
            raise InvalidInputError(
                f"{name} is what the kinds differ in, and {name}={value} would make them another; set kind to one of "
                f"{names}, or {name} in fitproof search"
            )


def _check_kind(experiment: Experiment, settings: Mapping[str, Any]) -> None:
    """Refuse the kind that was asked for if a technique that it sets cannot be used here, in any configuration."""
    hardware = hardware_of(experiment.device)
    for technique in experiment.techniques:
        if type(technique).model_fields.keys() & settings.keys():
            reason = next(technique.refusals(experiment.settings, hardware, experiment.model), None)
            if reason is not None:
                raise InvalidInputError(reason)


def _shared(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all kinds share; a model that has weights is trained from them."""
    own = FinetuneSettings.model_fields.keys() - ({"budget"} if given.get("budget") else set())
    shared = merged(values, {name: value for name, value in given.items() if name not in own})
    model = str(shared.get("model", "auto"))
    is_preset = any(model in family.names for family in MODELS.values()) or model == "auto"
    has_weights = not is_preset and ("/" in model or Path(model).is_dir())
    weights = {family_of(model, shared.get("task")): {"pretrained": True}} if has_weights else {}
    return merged(weights, shared)


def _budget(shared: Mapping[str, Any], console: Console) -> str:
    """Return the budget of this machine; an automatic one is said."""
    budget = str(shared.get("budget") or SearchSettings.model_fields["budget"].default)
    if budget == "none":
        raise InvalidInputError("finetune needs a budget, and budget is none; set budget=auto, or one such as 16GiB")
    if budget == "auto":
        budget, notes = automatic_budget(find_device(str(shared.get("device", "auto"))))
        console.print(*notes, sep="\n", highlight=False)
    return budget


def _of_config(own: KindsSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the file `config` but those that the kinds and the configurations differ in."""
    if given.get("config") in (None, "none"):
        return {}
    varied = {*own.compared.space, *read_yaml(yaml_file("search")).get("space", {}), *FOLLOWING}
    varied |= {name for settings in own.kinds.values() for name, _ in dotted(settings)}
    varied |= FinetuneSettings.model_fields.keys() - {"budget"}
    return nested({k: v for k, v in dotted(read_config(Path(str(given["config"])))) if k not in varied})


def _skipped(plan: Planned) -> str | None:
    """Return why a kind cannot run within the budget; None if it can."""
    if isinstance(plan, str):
        return plan
    if plan.recommended is not None:
        return None
    least_mib, budget_mib = min(row.peak_bytes for row in plan.rows) / MIB, plan.budget_bytes / MIB
    return f"its smallest configuration needs {least_mib:,.1f} MiB, and the budget is {budget_mib:,.1f} MiB"


def _comparison(own: KindsSettings, shared: Mapping[str, Any], planned: Mapping[str, Planned]) -> EntryPoint:
    """Return the comparison of the kinds, each with its fastest expected configuration, or one that stands for it."""
    baseline = next((name for name, plan in planned.items() if _skipped(plan) is None), next(iter(planned)))
    variants = []
    for name in sorted(planned, key=lambda name: name != baseline):
        plan, choice = planned[name], SMALLEST
        if isinstance(plan, CardPlan):
            choice = (plan.recommended or min(plan.rows, key=lambda row: row.peak_bytes)).choice
        experiment = _experiment(own, shared, own.kinds[name], choice)
        variants.append(Variant("kinds", name, experiment, _skipped(plan), name == baseline))
    return EntryPoint(ENTRY, SPACES[ENTRY], tuple(variants), own.compared.sections)


def _experiment(
    own: KindsSettings, shared: Mapping[str, Any], settings: Mapping[str, Any], choice: Mapping[str, Any]
) -> Experiment:
    """Return the compared run of a kind with these settings, in one configuration of the compared space."""
    length = {"num_steps": own.compared.num_steps, "eval_steps": own.compared.eval_steps}
    values = {**length, **{name: value for name, value in shared.items() if name != "num_epochs"}}
    return make_experiment(merged(merged(values, nested(settings)), nested(choice)), ENTRY)
