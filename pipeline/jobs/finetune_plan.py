"""`fitproof finetune --gpu CARD`: which kinds of fine-tuning fit a card, at which length, and how fast."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pipeline.base.by_key import grouped
from pipeline.base.errors import InvalidInputError
from pipeline.base.progress import progress
from pipeline.base.settings import Settings
from pipeline.config.experiment import make_experiment
from pipeline.config.given import dotted, merged, nested
from pipeline.jobs.plan import AUTO_LENGTH, LENGTH, make_plan
from pipeline.jobs.plan_settings import budget_bytes_on, targets
from pipeline.planning.plan import CardPlan, PlanFindings
from pipeline.report.command import command_line
from pipeline.training.metrics import common_settings

Values = Mapping[str, Any]
LEANEST: Values = {"micro_batch_size": 1, "checkpointing": "every_layer", "loss_kernel": "chunked"}
"""Of each dimension the value that needs the least memory."""


class KindsOnCardsSettings(Settings):
    """The settings of `finetune` on cards."""

    gpu: str | None = None
    """Cards, as of plan, to say which kinds fit them and how fast; nothing is trained then."""
    longest: bool = False
    """With gpu: whether the longest sequences that each kind can train are found as well, which takes longer."""
    install: bool = False
    """With gpu: whether torch's CUDA build may be fetched (0.7 GB) for simulated cards."""


OF_CARDS = tuple(KindsOnCardsSettings.model_fields)
"""Names of these settings, which runs do not have."""


class UnsupportedKindError(InvalidInputError):
    """No card can train a kind of fine-tuning."""


def plan_each(
    kinds: Mapping[str, Values], shared: Values, plan: Callable[[Values], PlanFindings]
) -> tuple[dict[str, PlanFindings], dict[str, InvalidInputError]]:
    """Return the plan of each kind by its name, and why the others have none.

    Raises:
        InvalidInputError: no kind has one.

    """
    plans: dict[str, PlanFindings] = {}
    reasons: dict[str, InvalidInputError] = {}
    with progress(f"planning {len(kinds)} kinds of fine-tuning", len(kinds)) as advance:
        for name, settings in kinds.items():
            try:
                plans[name] = plan(merged(shared, nested(settings)))
            except InvalidInputError as error:
                reasons[name] = error
            advance(1, f"last: {name}")
    if not plans:
        by_reason = grouped((str(reason), name) for name, reason in reasons.items())
        named = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
        raise InvalidInputError("\n".join(named if len(named) > 1 else by_reason))
    return plans, reasons


def plan_kinds(
    kinds: Mapping[str, Values], space: Values, shared: Values, own: KindsOnCardsSettings, given: Values
) -> PlanFindings:
    """Return the plan of each kind on the cards `gpu`.

    Raises:
        InvalidInputError: a setting or a card is wrong, or no kind can be planned.

    """
    gpu = str(own.gpu)

    def plan(values: Values) -> PlanFindings:
        values = {**values, "gpu": gpu, "install": own.install}
        if reason := _unsupported(values):
            raise UnsupportedKindError(reason)
        found = _plan(values, space)
        return _with_longest(found, values) if own.longest else found

    plans, reasons = plan_each(kinds, shared, plan)
    first = next(iter(plans.values()))
    cards = []
    for number, target in enumerate(targets(gpu)):
        for name in kinds:
            if name in plans:
                cards.append(replace(plans[name].cards[number], kind=name))
            else:
                budget_bytes = budget_bytes_on(shared.get("budget"), None, target)
                cards.append(
                    CardPlan(
                        card=target.name,
                        budget_bytes=budget_bytes,
                        rows=(),
                        skipped=(str(reasons[name]),),
                        breakdown=None,
                        kind=name,
                        unsupported=str(reasons[name]) if isinstance(reasons[name], UnsupportedKindError) else None,
                    )
                )
    return replace(
        first,
        entry="finetune",
        cards=tuple(cards),
        settings=common_settings([plan.settings for plan in plans.values()]),
        command=_command(cards, given),
    )


def _unsupported(values: Values) -> str | None:
    """Return why no card can train a kind of fine-tuning, such as a package that is not installed; None if one can."""
    of_run = {"micro_batch_size": 1, **_of_run(values), "device": "cpu"}
    experiment = make_experiment(of_run, "finetune")
    if "micro_batch_size" not in values and experiment.description.needs_whole_batch:
        experiment = make_experiment({**of_run, "micro_batch_size": experiment.effective_batch_size}, "finetune")
    reasons = [experiment.unsupported(target) for target in targets(str(values["gpu"]))]
    return reasons[0] if all(reasons) else None


def _of_run(values: Values) -> dict[str, Any]:
    """Return the settings of a run among those of a plan."""
    return {name: value for name, value in values.items() if name not in (*OF_CARDS, "space", "budget")}


def _plan(values: Values, space: Values) -> PlanFindings:
    """Return the plan of a kind: of its leanest configurations and, if one of them fits a card, of the others.

    The others have the number format that is expected to be the fastest of the leanest ones.
    """
    leanest = {name: [value] for name, value in LEANEST.items() if _unsupported({**values, name: value}) is None}
    least = make_plan({**values, "space": {**space, **leanest}})
    start = next((card.recommended for card in least.cards if card.recommended is not None), None)
    if start is None:
        return least
    fastest = {name: [value] for name, value in start.choice.items() if name == "precision"}
    loss_kernel = {name: leanest[name] for name in ("loss_kernel",) if name in leanest}
    others = {**space, **loss_kernel, **fastest}
    return make_plan({**values, "space": others})


def _with_longest(plan: PlanFindings, values: Values) -> PlanFindings:
    """Return the plan of a kind with the longest sequences on each card, of the configurations with the least peaks."""
    least = [min(card.rows, key=lambda row: row.peak_bytes).choice for card in plan.cards if card.recommended]
    if not least:
        return plan
    space = {name: list(dict.fromkeys(choice[name] for choice in least)) for name in least[0]}
    longest = make_plan({**values, LENGTH: AUTO_LENGTH, "space": space})
    cards = []
    for card, found in zip(plan.cards, longest.cards, strict=True):
        length = found.recommended.choice[LENGTH] if card.recommended and found.recommended else None
        cards.append(replace(card, longest_length=length))
    return replace(plan, cards=tuple(cards))


def _command(cards: list[CardPlan], given: Values) -> str | None:
    """Return the command that searches, on a machine with the card, the first kind that fits; None if none does."""
    kind = next((card.kind for card in cards if card.recommended is not None), None)
    if kind is None:
        return None
    of_search = {name: value for name, value in given.items() if name not in OF_CARDS}
    return command_line("finetune", {**dict(dotted(of_search)), "kind": kind})
