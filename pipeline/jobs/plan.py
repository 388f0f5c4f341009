"""`fitproof plan`: the predicted memory of every configuration on each card, and the one to start with.

With sequence_length=auto each configuration has the longest sequences that fit.
"""

import itertools
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.progress import progress
from pipeline.base.units import MIB
from pipeline.config.experiment import AUTO_MODEL, Experiment
from pipeline.config.given import dotted, split_off, validate
from pipeline.config.settings import AllSettings, default_values
from pipeline.config.space import Choice, Space, nothing_left, read_space, sentences, space_values
from pipeline.jobs.notes import corpus_notes
from pipeline.jobs.plan_settings import PlanSettings, budget_bytes_on, check_world_size, price_per_hour, targets
from pipeline.memory.breakdown import Breakdown
from pipeline.planning.clipping import cost_of_clipping
from pipeline.planning.longest import MULTIPLE, Longest, largest_length, longest_of_each
from pipeline.planning.plan import CardPlan, PlanFindings, PlannedRow, experiments_on, planned_row
from pipeline.planning.promising import predict_promising
from pipeline.planning.rates import cost_prior, note_on_links, note_on_rates
from pipeline.planning.reasons import compared, reasons_for
from pipeline.planning.step_time import CostPrior
from pipeline.prediction.card_processes import card_processes
from pipeline.prediction.cards import notes_on_card
from pipeline.prediction.patches import notes_on
from pipeline.prediction.predict import counted_causes, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.environment import environment
from pipeline.simulation.links import GPUS_PER_MACHINE
from pipeline.simulation.run import on_cuda_build
from pipeline.training.typical_step import evaluation_note, lengths_note

LENGTH = "sequence_length"
AUTO_LENGTH = "auto"
"""The value of sequence_length for which a plan finds the longest that fits."""
LENGTHS_SPACE = "space_of_lengths"
"""The key of plan.yaml with the default space of such a plan."""
WORTH_SAVING = 0.01
"""Share of a peak that gradients must exceed for it to be said what the peak would be without clipping."""
EXAMPLE_LENGTH = 256
"""Length at which the corpus is then read for the shape of an example."""
NOT_PREDICTED = "no configuration is predicted: "
"""How the reason begins why a card has no predictions."""


def plan(given: Mapping[str, Any], console: Console) -> int:
    """Predict, print and log; return the exit code: 1 if nothing is predicted to fit any card.

    Raises:
        InvalidInputError: as make_plan(), or the tracking store cannot be reached.

    """
    return 0 if log_plan(make_plan(given), console) else 1


def make_plan(given: Mapping[str, Any]) -> PlanFindings:
    """Return the predicted memory of every configuration; show progress only, and log nothing.

    Raises:
        InvalidInputError: a setting, a card or a dimension is wrong, or the parameters alone exceed the budget.

    """
    own, values = _read({"gpu": given["device"], **given} if "device" in given else given)
    check_world_size(own, given)
    budget = values.pop("budget", None)
    devices = targets(own.gpu, own.nums_gpus)
    if any(device.kind == "cuda" for device in devices):
        on_cuda_build((sys.executable,), own.install)
        card_processes()  # its host imports torch and transformers meanwhile
    values |= {"device": "cpu", "model": values.get("model", "auto")}
    if values["model"] == "auto":
        values["model"] = AUTO_MODEL[devices[0].kind]
    if own.effective_batch_sizes and "effective_batch_size" in given:
        raise InvalidInputError(
            f"a plan takes effective_batch_size ({given['effective_batch_size']}) or effective_batch_sizes "
            f"({own.effective_batch_sizes}), and both are given; leave one out"
        )
    lengths_up_to = None
    if values.get(LENGTH) == AUTO_LENGTH:
        lengths_up_to = largest_length(Experiment(validate(AllSettings, {**values, LENGTH: MULTIPLE}, "plan")))
        values[LENGTH] = min(EXAMPLE_LENGTH, lengths_up_to)
    batches = [values | {"effective_batch_size": size} for size in dict.fromkeys(own.effective_batch_sizes)] or [values]
    planned = []
    for target, batch in itertools.product(devices, batches):
        price_per_hour(target, own.prices)  # a wrong name is said before predictions
        all_ranks = {"world_size": target.count} if own.gpus else {}
        of_card = {**batch, **all_ranks}
        planned.append((target, of_card, *read_space(own, of_card, {**given, **all_ranks}, "plan", target)))
    _, _, shared, space = planned[0]
    for name in ("model", "effective_batch_size"):
        if name in space.dimensions:
            raise InvalidInputError(
                f"all configurations of a plan share {name}, so it cannot be a dimension; make a plan for each value"
            )
    cards = tuple(_card_plan(target, budget, batch, space, own, lengths_up_to) for target, batch, _, space in planned)
    if not any(card.rows for card in cards):
        raise InvalidInputError("\n".join(map(_why_nothing, cards)))
    if len(cards) == 1:
        _refuse_hopeless(cards[0], Experiment(shared), devices[0])
    differing = {*space.dimensions, "device", "budget"}
    differing |= {"effective_batch_size", "accumulation_steps"} if own.effective_batch_sizes else set()
    differing |= set() if lengths_up_to is None else {LENGTH}
    differing |= {"world_size"} if len(own.nums_gpus) > 1 else set()
    return PlanFindings(
        entry="plan",
        model=values["model"],
        effective_batch_size=shared.effective_batch_size,  # type: ignore[attr-defined]
        dataset_size=shared.dataset_size,
        cards=cards,
        settings={name: value for name, value in dotted(shared.model_dump()) if name not in differing},
        environment=environment(torch.device("cpu")),
        gpu=own.gpu,
    )


def log_plan(findings: PlanFindings, console: Console) -> bool:
    """Print the report of a plan and log it as a job; return whether anything fits.

    Raises:
        InvalidInputError: the tracking store cannot be reached, or the folder `output` cannot be written.

    """
    from pipeline.jobs.publish import publish
    from pipeline.tracking.job import open_job

    fits = any(card.recommended is not None for card in findings.cards)
    sizes = ", ".join(map(str, findings.effective_batch_sizes))
    params = {"model": findings.model, "effective_batch_size": sizes, "gpu": findings.gpu}
    subject = f"{findings.model} on {findings.gpu}"
    if any(card.lengths_up_to for card in findings.cards):
        subject, params[LENGTH] = f"longest sequences of {subject}", AUTO_LENGTH
    with open_job(findings.entry, subject, Path(findings.settings["output"]), findings.environment) as job:
        job.params(params)
        publish(findings, job, console)
        job.succeeded = fits
    return fits


def _why_nothing(card: CardPlan) -> str:
    """Return why a card has no predictions."""
    unpredicted = [reason for reason in card.skipped if reason.startswith(NOT_PREDICTED)]
    return "\n".join(unpredicted) if unpredicted else f"{card.name}: {nothing_left(card.skipped)}"


def _read(given: Mapping[str, Any]) -> tuple[PlanSettings, dict[str, Any]]:
    """Return the settings of the plan and those of its configurations."""
    values = space_values("plan", given)
    of_lengths = values.pop(LENGTHS_SPACE, None)
    if values.get(LENGTH) == AUTO_LENGTH:
        values["space"] = given.get("space", of_lengths or values["space"])
        if LENGTH in values["space"]:
            raise InvalidInputError(
                f"{LENGTH}={AUTO_LENGTH} finds the length of each configuration, and {LENGTH} is a dimension too; "
                "leave one of them out"
            )
    return split_off(PlanSettings, values, "plan")


def _card_plan(
    target: Hardware,
    budget: str | None,
    values: Mapping[str, Any],
    space: Space,
    own: PlanSettings,
    lengths_up_to: int | None,
) -> CardPlan:
    """Return the predictions of every configuration on one card, and the memory breakdown of the recommended one."""
    budget_bytes = budget_bytes_on(budget, own.other_processes, target)
    experiments, choices, refusals = experiments_on(target, values, space, own.mathematics)
    links, world_size = own.links(target), max((one.world_size for one in experiments), default=1)
    prior = cost_prior(target, links)
    rows: dict[int, PlannedRow] = {}
    breakdowns: dict[int, Breakdown] = {}
    causes: dict[int, str] = {}

    def keep(number: int, found: Longest | Prediction | InvalidInputError) -> None:
        if isinstance(found, InvalidInputError):
            if number not in rows:  # else its memory is known, and its breakdown is not
                causes[number] = str(found)
            return
        choice, experiment, next_peak_bytes = choices[number], experiments[number], None
        if isinstance(found, Longest):
            experiment, next_peak_bytes, found = found.experiment, found.next_peak_bytes, found.prediction
            choice = {**choice, LENGTH: experiment.settings.sequence_length}
        rows[number] = planned_row(choice, experiment, found, budget_bytes, prior, next_peak_bytes)
        if found.breakdown is not None:
            breakdowns[number] = found.breakdown

    with closing(_outcomes(experiments, choices, target, budget_bytes, prior, own.all, lengths_up_to)) as outcomes:
        for number, found in outcomes:
            keep(number, found)
    beside = [n for n in compared(rows, choices, default_values()) if n not in breakdowns and n not in causes]
    for place, prediction in predict_each([experiments[n] for n in beside], target, budget_bytes=budget_bytes):
        keep(beside[place], prediction)
    unpredicted = [] if rows else [f"{NOT_PREDICTED}{cause}" for cause in dict.fromkeys(causes.values())]
    ordered = tuple(rows[number] for number in sorted(rows))
    notes = [
        *notes_on_card(target),
        note_on_rates(target),
        note_on_links(links, world_size) if links and world_size > 1 else None,
        *counted_causes(causes.values(), len(experiments)),
        *notes_on(experiments, target),
        *map(_lengths_note, {one.settings.sequences: one for one in experiments}.values()),
        *(note for one in experiments[:1] for note in (one.description.note, evaluation_note(one))),
        *(note for one in experiments[:1] if lengths_up_to is None for note in corpus_notes(one)),
    ]
    alone = [row for row in ordered if row.accumulation_steps == 1]  # others keep all gradients in any case
    saves = any(row.category_bytes.get("gradients", 0) > WORTH_SAVING * row.peak_bytes for row in alone)
    is_asked = saves and True in space.dimensions.get("optimizer_in_backward", ())
    if lengths_up_to is None and (is_asked or not any(row.fits for row in ordered)):
        peaks = [(experiments[number], row.peak_bytes) for number, row in rows.items()]
        notes.append(cost_of_clipping(peaks, target, budget_bytes))
    card = CardPlan(
        card=target.name,
        budget_bytes=budget_bytes,
        rows=ordered,
        skipped=sentences(refusals) if rows else (*unpredicted, *refusals),
        breakdown=None,
        notes=tuple(note for note in notes if note),
        effective_batch_size=values["effective_batch_size"] if own.effective_batch_sizes else None,
        num_cards=(target.count or 1) if target.kind == "cuda" else 1,
        price_per_hour=price_per_hour(target, own.prices),
        num_configurations=None if len(rows) + len(causes) == len(experiments) else len(experiments),
        lengths_up_to=lengths_up_to,
        gpus_per_host=links.gpus_per_host if links else GPUS_PER_MACHINE,
    )
    best = card.recommended or min(ordered, key=lambda row: row.peak_bytes, default=None)
    breakdown = next((breakdowns.get(number) for number, row in rows.items() if row is best), None)
    reasons: tuple[str, ...] = ()
    if card.recommended is not None:
        reasons = reasons_for(card.recommended, ordered, [breakdowns.get(n) for n in sorted(rows)], default_values())
    return replace(card, breakdown=breakdown, reasons=reasons)


def _outcomes(
    experiments: Sequence[Experiment],
    choices: Sequence[Choice],
    target: Hardware,
    budget_bytes: int,
    prior: CostPrior,
    wants_all: bool,
    lengths_up_to: int | None,
) -> Generator[tuple[int, Longest | Prediction | InvalidInputError], None, None]:
    """Yield the number of a configuration and what is predicted of it, or why nothing is, and show the progress."""
    which, total = f"{len(experiments):,} configurations", len(experiments)
    outcomes: Generator[tuple[int, Longest | Prediction | InvalidInputError], None, None]
    if lengths_up_to is not None:
        which, outcomes = f"the longest sequences of {which}", longest_of_each(experiments, target, budget_bytes)
    elif wants_all:
        outcomes = predict_each(experiments, target, budget_bytes=budget_bytes)
    else:
        which, total = f"the most promising of {which}", 0
        outcomes = predict_promising(experiments, choices, target, budget_bytes, prior)
    with closing(outcomes), progress(f"predicting {which} on {target.name}", total) as advance:
        for num_done, outcome in enumerate(outcomes, start=1):
            yield outcome
            advance(1, "" if total else f"{num_done} done")


def _lengths_note(experiment: Experiment) -> str | None:
    """Return what peaks and estimated times are of, if micro-batches differ in length."""
    note = lengths_note(experiment)
    return note and f"{note}, estimated from the work of the longest one and the lengths that the run draws"


def _refuse_hopeless(card: CardPlan, experiment: Experiment, target: Hardware) -> None:
    """Refuse a budget that the parameters alone exceed."""
    parameters = card.breakdown.category_bytes.get("parameters", 0) if card.breakdown else 0
    if parameters > card.budget_bytes:
        missing = (parameters - card.budget_bytes) / MIB
        raise InvalidInputError(
            f"the parameters must fit the budget: those of {experiment.settings.model} alone take "
            f"{parameters / MIB:,.1f} MiB, {missing:,.1f} MiB more than the {card.budget_bytes / MIB:,.1f} MiB; choose "
            + "; ".join(
                filter(
                    None, ("a smaller model or a larger card", *experiment.notes(target), experiment.description.note)
                )
            )
        )
