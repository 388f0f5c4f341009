"""`fitproof plan --sequence_length auto`: the longest sequences that fit each card, for each configuration."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch
from rich.console import Console

from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.progress import progress
from pipeline.config.experiment import AUTO_MODEL, Experiment, notes_on
from pipeline.config.settings import RunSettings, dotted, validate
from pipeline.config.space import Space, read_space, sentences, space_values
from pipeline.jobs.plan_settings import (
    AUTO_LENGTH,
    LENGTHS_SPACE,
    PlanSettings,
    budget_bytes_on,
    log_findings,
    planned_row,
    size_of_all,
    targets,
)
from pipeline.memory.device import num_cores
from pipeline.planning.experiments import experiments_on
from pipeline.planning.longest import CardLengths, Longest, LongestFindings, LongestRow, largest_length
from pipeline.planning.longest import longest_that_fits as longest_of
from pipeline.planning.rates import cost_prior, note_on_link, note_on_rates
from pipeline.prediction.card_processes import python_on_cuda_build
from pipeline.prediction.cards import notes_on_card
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.patches import not_predicted
from pipeline.prediction.predict_all import why_not_predicted
from pipeline.runtime.environment import environment
from pipeline.runtime.worker_pool import run_all, worker_pool

EXAMPLE_LENGTH = 256
"""Length at which the corpus is read for the shape of an example."""


def find_longest(given: Mapping[str, Any]) -> LongestFindings:
    """Return the longest sequences of every configuration; show progress only, and log nothing.

    Raises:
        InvalidInputError: a setting, a card or a dimension is wrong, or no configuration is left.

    """
    own, values = _read(given)
    all_ranks = size_of_all(own, given)
    values, given = {**values, **all_ranks}, {**given, **all_ranks}
    if own.effective_batch_sizes:
        raise InvalidInputError("the longest sequences are of one effective_batch_size; remove effective_batch_sizes")
    budget = values.pop("budget", None)
    cards = targets(own.gpu, own.gpus)
    if any(card.kind == "cuda" for card in cards):
        python_on_cuda_build(own.install)
    values |= {"device": "cpu", "model": values.get("model", "auto"), "sequence_length": MINIMUM}
    if values["model"] == "auto":
        values["model"] = AUTO_MODEL[cards[0].kind]
    shared, first = read_space(own, values, given, "plan", cards[0])
    _check(values, first)
    limit = largest_length(Experiment(shared))
    values["sequence_length"] = min(EXAMPLE_LENGTH, limit)
    spaces = [read_space(own, values, given, "plan", card)[1] for card in cards]
    found = tuple(
        _of_card(card, budget_bytes_on(budget, own.other_processes, card), values, space, own)
        for card, space in zip(cards, spaces, strict=True)
    )
    if not any(card.rows for card in found):
        raise InvalidInputError("\n".join(dict.fromkeys(reason for card in found for reason in card.skipped)))
    left_out = (*first.dimensions, "device", "budget", "sequence_length")
    return LongestFindings(
        entry="plan",
        model=values["model"],
        effective_batch_size=shared.effective_batch_size,  # type: ignore[attr-defined]
        largest_length=limit,
        cards=found,
        settings={name: value for name, value in dotted(shared.model_dump()) if name not in left_out},
        environment=environment(torch.device("cpu")),
    )


def log_longest(findings: LongestFindings, given: Mapping[str, Any], console: Console) -> bool:
    """Print and log the report; return whether anything fits.

    Raises:
        InvalidInputError: the tracking store cannot be reached, or the folder `output` cannot be written.

    """
    own, values = _read(given)
    fits = any(card.longest is not None for card in findings.cards)
    subject, params = f"longest sequences of {findings.model} on {own.gpu}", {"sequence_length": AUTO_LENGTH}
    log_findings(findings, subject, {"gpu": own.gpu, **params}, values, console, succeeded=fits)
    return fits


MINIMUM = int(RunSettings.model_fields["sequence_length"].metadata[0].ge)
"""The smallest value of the setting sequence_length, while the model's limit is not known yet."""


def _read(given: Mapping[str, Any]) -> tuple[PlanSettings, dict[str, Any]]:
    """Return the settings of the plan, with the space of lengths unless one is given, and those of configurations."""
    values = space_values("plan", given)
    lengths = values.pop(LENGTHS_SPACE, values.get("space", {}))
    values["space"] = given.get("space", lengths)
    own = {name: values.pop(name) for name in PlanSettings.model_fields if name in values}
    return validate(PlanSettings, own, "plan"), values


def _check(values: Mapping[str, Any], space: Space) -> None:
    """Refuse dimensions that all configurations share, and policies that are chosen for one length."""
    for name in ("model", "effective_batch_size", "sequence_length"):
        if name in space.dimensions:
            raise InvalidInputError(
                f"all configurations of a plan share {name} with sequence_length=auto, so it cannot be a dimension; "
                "make a plan for each value"
            )
    policies = {*space.dimensions.get("checkpointing", ()), values.get("checkpointing")}
    if any(text == "auto" or ":auto" in str(text) for text in policies):
        raise InvalidInputError(
            "checkpointing=auto chooses policies for one length, and sequence_length=auto tries many; name policies, "
            "such as every_layer, or give sequence_length itself"
        )


def _of_card(
    target: Hardware,
    budget_bytes: int,
    values: Mapping[str, Any],
    space: Space,
    own: PlanSettings,
) -> CardLengths:
    experiments, choices, refusals = experiments_on(target, values, space, own.mathematics)
    prior, rows, unpredicted = cost_prior(target, own.known_link), dict[int, LongestRow](), dict[str, None]()
    text = f"predicting the longest sequences of {len(experiments)} configurations on {target.name}"
    with progress(text, len(experiments)) as advance:
        for number, found in _search(experiments, target, budget_bytes):
            advance(1)
            if isinstance(found, str):
                unpredicted[found] = None
                continue
            planned = planned_row(choices[number], found.experiment, found.prediction, budget_bytes, prior)
            rows[number] = LongestRow(
                sequence_length=found.length, planned=planned, next_peak_bytes=found.next_peak_bytes
            )
    notes = (
        *notes_on_card(target),
        note_on_rates(target),
        note_on_link(target, own.known_link) if experiments and experiments[0].world_size > 1 else None,
        *not_predicted(experiments, target.kind),
        *notes_on(experiments),
    )
    return CardLengths(
        card=target.name,
        budget_bytes=budget_bytes,
        rows=tuple(rows[number] for number in sorted(rows)),
        skipped=(*sentences(refusals), *unpredicted) if rows else (*refusals, *unpredicted),
        notes=tuple(note for note in notes if note),
    )


def _search(
    experiments: Sequence[Experiment], target: Hardware, budget_bytes: int
) -> Iterator[tuple[int, Longest | str]]:
    """Yield the number of each experiment and what was found, or why it cannot be predicted; in worker processes."""
    work = partial(_found, target=target, budget_bytes=budget_bytes, context_bytes=context_bytes_of(target))
    if target.kind == "cuda":  # each length runs in a process of its own
        with ThreadPoolExecutor(num_cores()) as threads:
            futures = {threads.submit(work, one): number for number, one in enumerate(experiments)}
            yield from ((futures[done], done.result()) for done in as_completed(futures))
        return
    with worker_pool(max(1, min(num_cores(), len(experiments)))) as pool:
        yield from run_all(pool, work, experiments)


def _found(experiment: Experiment, target: Hardware, budget_bytes: int, context_bytes: int) -> Longest | str:
    try:
        return longest_of(experiment, target, budget_bytes, context_bytes)
    except Exception as error:  # whatever a model or a technique raises on fake tensors
        return str(why_not_predicted(error))
