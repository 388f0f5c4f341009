"""The report of a plan: the predicted memory of every configuration on each card, and the one to start with."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from pipeline.base.by_key import grouped
from pipeline.base.units import MIB
from pipeline.config.given import written
from pipeline.planning.longest import MULTIPLE
from pipeline.planning.plan import CardPlan, PlanFindings, PlannedRow
from pipeline.report.breakdown import tensors_table
from pipeline.report.command import command_of, command_on_machines
from pipeline.report.heat_map import fit_plot, margins_text, percent_text, seconds_text, speed_text
from pipeline.report.page import Headline, Report, Section
from pipeline.report.plot import short
from pipeline.report.table import Form, Table
from pipeline.searching.trials import columns, label

NUM_IN_TERMINAL = 5
"""Configurations of a card that the terminal shows."""
PRICE = "price of 1e9 tokens"
"""Column of what they cost, in the currency of the prices that were given."""
NUM_TOLD = 2
"""Cards of which each has a sentence in the terminal, beside the table."""
NEXT = "at the next MiB"
"""Column of the peak at the next length."""
OVERLAPS = ("s if all overlaps", "s if nothing does")
"""Columns of the seconds of several ranks."""
NUM_ON_PAGE = 300
"""Configurations of all cards' tables on the page; the CSV files have all."""
NUM_CELLS = 1800
"""Configurations of all heat maps of a page, so that it stays small: those of the fastest combinations."""
NOTE_ON_OTHERS = (
    "The configurations that were not predicted are expected to be slower, or to need more memory than there is; "
    "--all true predicts all."
)
ESTIMATED = (
    "Times are estimated from what a step computes, moves and launches, and from what the device does in a second; a "
    "search measures them, and may order differently what lies within the margin."
)


def plan_report(findings: PlanFindings) -> Report:
    """Return the report; the terminal shows the tables of a card if it is the only one."""
    several = len(findings.cards) > 1
    lead = _lead(findings.cards) if any(card.recommended for card in findings.cards) else None
    sections = [_card_section(card, findings) for card in findings.cards]
    if several:
        table = _cards_table(findings.cards)
        sections = [Section(title=table.title, tables=(table,)), *(one.on_page_alone() for one in sections)]
    figures = () if several else sections[0].headlines
    if figures:
        sections[0] = replace(sections[0], headlines=())
    sizes = " or ".join(map(str, findings.effective_batch_sizes))
    how_long = any(card.lengths_up_to for card in findings.cards)
    begin = f"How long may sequences of {findings.model} be" if how_long else f"What would {findings.model} need"
    return Report(
        entry=findings.entry,
        question=(
            f"{begin} at an effective batch of {sizes} on "
            f"{', '.join(dict.fromkeys(card.card for card in findings.cards))}?"
        ),
        answer=_answer_of_all(findings.cards, lead),
        headlines=figures,
        lead=lead,
        commands=_commands(findings),
        sections=tuple(sections),
        environment=findings.environment,
        settings=findings.settings,
    )


def _answer_of_all(cards: Sequence[CardPlan], lead: str | None) -> str:
    """Return a sentence for each card, or for the kinds on it; the answer in words where these are too many."""
    if lead is None:
        return " ".join(_answers(cards))
    is_told_by_table = len(cards) > NUM_TOLD and all(card.kind is None for card in cards)
    return lead if is_told_by_table else " ".join([*_answers(cards), ESTIMATED])


def _lead(cards: Sequence[CardPlan]) -> str:
    """Return the answer in words beside its figures or the table of cards: the fastest start of all cards."""
    card, best = _first(cards)
    start = f"{label(best.choice)}, about {speed_text(best)} ({percent_text(best)})"
    what, those = "fastest start is that", "fastest that is"
    if card.lengths_up_to is not None:
        what, those = "longest sequences, of equal ones the fastest, are those", "longest sequences that are"
    if len(cards) == 1:
        return f"Start with {start}: the {those} predicted to fit. {ESTIMATED}"
    if card.kind is None and card.lengths_up_to is None and len(cards) <= NUM_TOLD + 1:
        start += _against_others(card, best, cards)
    without = [card.name for card in cards if card.recommended is None]
    nothing = f" Nothing fits {', '.join(without)}." if without else ""
    return f"The {what} on {card.name}: {start}.{_cheapest(cards)}{nothing} {ESTIMATED}"


def _cheapest(cards: Sequence[CardPlan]) -> str:
    """Return on which card tokens cost the least, after another sentence; nothing where fewer than two have prices."""
    prices = [(card.price(card.recommended), card.name) for card in cards if card.recommended is not None]
    known = sorted((price, name) for price, name in prices if price is not None)
    return f" A billion tokens cost the least on {known[0][1]}: {known[0][0]:,.2f}." if len(known) > 1 else ""


def _against_others(card: CardPlan, best: PlannedRow, cards: Sequence[CardPlan]) -> str:
    """Return how many times as fast a card's start is as those of other cards, after another clause."""
    factors = {
        other.name: f"{best.tokens_per_second / other.recommended.tokens_per_second:.1f}"
        for other in cards
        if other.recommended is not None and other.card != card.card
    }
    shown = [f"{'about' if factor == '1.0' else f'{factor} x'} that of {name}" for name, factor in factors.items()]
    return f", {' and '.join(shown)}" if shown else ""


def _first(cards: Sequence[CardPlan]) -> tuple[CardPlan, PlannedRow]:
    """Return the recommended configuration to start with of all cards, of which there must be one, and its card."""
    found = [(card, card.recommended) for card in cards if card.recommended is not None]
    return min(found, key=lambda pair: pair[0].order(pair[1]))


def _commands(findings: PlanFindings) -> tuple[tuple[str, str], ...]:
    """Return what the command does that goes on from the plan, and its line; none if nothing fits."""
    if findings.command is not None:
        return (("Search the fastest configuration there", findings.command),)
    if not any(card.recommended for card in findings.cards):
        return ()
    card, best = _first(findings.cards)
    command, num_machines = _command_on(card, best, findings)
    machines = "" if num_machines == 1 else ", once on each machine, with one of them as HOST"
    return ((f"Run it on {card.card}{machines}", command),)


def _command_on(card: CardPlan, best: PlannedRow, findings: PlanFindings) -> tuple[str, int]:
    """Return the command that trains a configuration, and the number of computers on each of which it is given."""
    size = {} if card.effective_batch_size is None else {"effective_batch_size": card.effective_batch_size}
    all_ranks = {"world_size": card.num_cards}  # where the plan has several numbers of cards
    settings = {**all_ranks, **findings.settings, **size, **best.choice}
    num_machines = math.ceil(int(settings["world_size"]) / card.gpus_per_host)
    return command_on_machines(command_of("main", settings), num_machines), num_machines


def _answers(cards: Sequence[CardPlan]) -> list[str]:
    """Return a sentence for each card: where to start, or which kinds of fine-tuning fit."""
    if all(card.kind is None for card in cards):
        return [_answer(card) for card in cards]
    sentences = []
    for name in dict.fromkeys(card.card for card in cards):
        kinds = [card for card in cards if card.card == name and card.unsupported is None]
        fitting = [_kind_that_fits(card, card.recommended) for card in kinds if card.recommended is not None]
        sentences.append(
            f"On {name} {len(fitting)} of {len(kinds)} kinds fit{': ' * bool(fitting)}{'; '.join(fitting)}."
        )
        if left_out := [_kind_that_does_not(card) for card in kinds if card.recommended is None]:
            sentences.append(f"Not {'; '.join(left_out)}.")
    unsupported = dict.fromkeys((card.unsupported, str(card.kind)) for card in cards if card.unsupported is not None)
    if unsupported:
        reasons = "; ".join(f"{', '.join(kinds)} ({reason})" for reason, kinds in grouped(unsupported).items())
        sentences.append(f"Not planned: {reasons}.")
    return sentences


def _kind_that_fits(card: CardPlan, best: PlannedRow) -> str:
    longest = "" if card.longest_length is None else f", sequences of up to {card.longest_length:,} tokens"
    return (
        f"{card.kind} ({label(best.choice)}: {best.peak_bytes / MIB:,.0f} of {card.budget_bytes / MIB:,.0f} MiB, about "
        f"{speed_text(best)}{longest})"
    )


def _kind_that_does_not(card: CardPlan) -> str:
    """Return why a kind does not fit, without the remedies, which are on the page."""
    if not card.rows:
        return f"{card.kind} ({'; '.join(reason.partition('; ')[0].rstrip('.') for reason in card.skipped)})"
    smallest = min(row.peak_bytes for row in card.rows) / MIB
    return f"{card.kind} (needs {smallest:,.0f} of {card.budget_bytes / MIB:,.0f} MiB at least)"


def _answer(card: CardPlan) -> str:
    best, budget = card.recommended, card.budget_bytes / MIB
    if not card.rows:
        return f"{card.name} can run none of the configurations: {'; '.join(card.skipped)}."
    if best is None:
        smallest = min(row.peak_bytes for row in card.rows) / MIB
        return (
            f"Nothing is predicted to fit {budget:,.0f} MiB of {card.name}: the smallest configuration needs "
            f"{smallest:,.0f} MiB{'' if card.lengths_up_to is None else f' with {MULTIPLE} tokens'}."
        )
    fitting = sum(row.fits for row in card.rows)
    length, longest = best.choice.get("sequence_length"), ""
    if card.lengths_up_to is not None:
        is_all = ", all that the model takes" if length == card.lengths_up_to else ""
        longest = f"sequences of up to {length:,} tokens do{is_all}; "
    return (
        f"On {card.name} {fitting} of {_which(card)} fit {budget:,.0f} MiB; {longest}"
        f"start with {label(best.choice)}: predicted peak {best.peak_bytes / MIB:,.0f} MiB, estimated "
        f"{seconds_text(best.seconds)} a step, {best.tokens_per_second:,.0f} tokens a second ({margins_text(best)})."
    )


def _which(card: CardPlan) -> str:
    if card.num_configurations is None:
        return f"{len(card.rows)} configurations are predicted to"
    return f"{len(card.rows)} configurations that were predicted (of {card.num_configurations:,})"


def _card_section(card: CardPlan, findings: PlanFindings) -> Section:
    size = card.effective_batch_size
    kind = [] if card.kind is None else [card.kind]
    choice = (card.card, *kind, *([] if size is None else [f"effective batch {size}"]))
    if not card.rows:
        return Section(title=card.name, notes=card.notes, left_out=card.skipped, choice=choice)
    name = re.sub(r"[^a-z0-9]+", "_", card.name.lower()).strip("_")
    num_on_page = NUM_ON_PAGE // len(findings.cards)
    tables = [_configurations_table(name, card, findings, num_on_page)]
    notes = card.notes
    plots = (fit_plot(f"fit_{name}", card, NUM_CELLS // len(findings.cards)),) if card.lengths_up_to is None else ()
    if card.num_configurations is not None:
        notes = (NOTE_ON_OTHERS, *notes)
    elif card.lengths_up_to is None:
        tables.append(_largest_table(name, card, num_on_page))
    if card.breakdown is not None:
        which = "recommended configuration" if card.recommended else "smallest configuration"
        when = f"optimizer step {card.breakdown.step + 1}, {card.breakdown.phase}"
        tensors = tensors_table(f"tensors_{name}", f"{which}: largest tensors at its peak ({when})", card.breakdown)
        tables.append(replace(tensors, num_in_terminal=0))
    return Section(
        title=card.name,
        headlines=() if card.recommended is None else _headlines(card, card.recommended, findings),
        why=card.reasons,
        tables=tuple(tables),
        notes=notes,
        left_out=card.skipped,
        plots=plots,
        choice=choice,
    )


def _headlines(card: CardPlan, best: PlannedRow, findings: PlanFindings) -> tuple[Headline, ...]:
    budget_mib, peak_mib = card.budget_bytes / MIB, best.peak_bytes / MIB
    factors = [best.micro_batch_size, best.accumulation_steps]
    num_ranks = findings.effective_batch_size_on(card) // math.prod(factors)
    several = num_ranks > 1
    return (
        Headline(
            title=f"start with micro-batch x accumulation{' x processes' if several else ''}",
            value=" x ".join(map(str, [*factors, num_ranks] if several else factors)),
            detail=f"{label(best.choice)}; to copy: its command",
            copied=_command_on(card, best, findings)[0],
        ),
        Headline(
            title="predicted peak",
            value=f"{peak_mib:,.0f} MiB",
            detail=f"{budget_mib - peak_mib:,.0f} MiB of headroom in {budget_mib:,.0f}",
        ),
        Headline(
            title="estimated speed",
            value=speed_text(best),
            detail=f"{seconds_text(best.seconds)} a step, {margins_text(best)}",
        ),
        _last_headline(card, best),
    )


def _last_headline(card: CardPlan, best: PlannedRow) -> Headline:
    if card.lengths_up_to is not None:
        length, next_peak_bytes = best.choice["sequence_length"], best.next_peak_bytes
        more = f"with {length + MULTIPLE:,} it would peak at {(next_peak_bytes or 0) / MIB:,.0f} MiB"
        detail = "all that the model takes" if next_peak_bytes is None else more
        return Headline(title="longest sequences", value=f"{length:,} tokens", detail=detail)
    return Headline(
        title="predicted to fit",
        value=f"{sum(row.fits for row in card.rows)} of {len(card.rows)}",
        detail=f"configurations on {card.card}"
        if card.num_configurations is None
        else f"predicted of {card.num_configurations:,}; the others are expected to be slower or not to fit",
    )


def _configurations_table(name: str, card: CardPlan, findings: PlanFindings, num_on_page: int) -> Table:
    best, shown = card.recommended, columns(row.choice for row in card.rows)
    has_longer = any(row.next_peak_bytes is not None for row in card.rows)
    lines = [
        {
            **{shown[key]: row.choice[key] for key in shown},
            **({NEXT: (row.next_peak_bytes or math.nan) / MIB} if has_longer else {}),
            "fits": "yes" if row.fits else "no",
            "tokens/s": row.tokens_per_second,
            "± %": 100 * row.deviation,
            "": "start here" if row is best else "",
            "headroom MiB": (card.budget_bytes - row.peak_bytes) / MIB,
            "allocated MiB": row.peak_allocated_bytes / MIB,
            **({} if row.peak_reserved_bytes is None else {"reserved MiB": row.peak_reserved_bytes / MIB}),
            **({} if row.peak_device_bytes is None else {"device MiB": row.peak_device_bytes / MIB}),
            "seconds per step": row.seconds,
            **({} if row.seconds_between is None else dict(zip(OVERLAPS, row.seconds_between, strict=True))),
        }
        for row in sorted(card.rows, key=card.order)
    ]
    whole = dict.fromkeys((NEXT, "allocated MiB", "reserved MiB", "device MiB", "headroom MiB"), "{:,.0f}")
    title = f"predicted for {card.name}, within {card.budget_bytes / MIB:,.0f} MiB"
    updates = math.ceil(findings.dataset_size / findings.effective_batch_size_on(card))
    note = (
        "Configurations that fit come first, in the order of their estimated tokens per second. "
        if card.lengths_up_to is None
        else f"The longest first: of each configuration the most tokens that fit, in multiples of {MULTIPLE} up to "
        f"{card.lengths_up_to:,}. {'The next length was predicted too, and does not fit. ' * has_longer}"
    ) + f"{updates:,} updates per epoch of {findings.dataset_size:,} sequences."
    return Table.of(
        f"plan_{name}",
        title,
        lines,
        forms={
            **whole,
            **dict.fromkeys(("seconds per step", *OVERLAPS), short),
            "tokens/s": "{:,.0f}",
            "± %": "{:.0f}",
        },
        note=note,
        num_in_terminal=NUM_IN_TERMINAL,
        expendable=("", NEXT, "device MiB", "allocated MiB", "headroom MiB", "± %", "seconds per step", *OVERLAPS),
        num_on_page=num_on_page,
    )


def _largest_table(name: str, card: CardPlan, num_on_page: int) -> Table:
    """Return the largest micro-batch that fits for each combination of the other dimensions."""
    largest: dict[tuple[tuple[str, Any], ...], int] = {}
    shown = [key for key in columns(row.choice for row in card.rows) if key != "micro_batch_size"]
    for row in card.rows:
        others = tuple((key, row.choice[key]) for key in shown)
        largest[others] = max(largest.get(others, 0), row.micro_batch_size if row.fits else 0)
    lines = [{**dict(others), "largest micro-batch": size or None} for others, size in largest.items()]
    frame = pd.DataFrame(lines).astype({"largest micro-batch": "Int64"})
    title = "the largest micro-batch that fits"
    return Table(
        name=f"largest_{name}", title=title, frame=frame, num_in_terminal=NUM_IN_TERMINAL, num_on_page=num_on_page
    )


def _cards_table(cards: Sequence[CardPlan]) -> Table:
    lines, shown = [], columns(card.recommended.choice for card in cards if card.recommended is not None)
    for card in cards:
        best = card.recommended
        line: dict[str, Any] = {"card": card.card, "budget GiB": card.budget_bytes / 2**30}
        if card.kind is not None:
            line["kind"] = card.kind
        if card.effective_batch_size is not None:
            line["effective batch"] = card.effective_batch_size
        if best is not None:
            line |= {shown[key]: written(best.choice[key]) for key in shown}
            line["accumulation"] = str(best.accumulation_steps)
            line["predicted MiB"] = best.peak_bytes / MIB
            line["headroom MiB"] = (card.budget_bytes - best.peak_bytes) / MIB
            line["seconds per step"] = best.seconds
            line["tokens/s"] = best.tokens_per_second
            if any(one.num_cards > 1 for one in cards):
                line["tokens/s a GPU"] = best.tokens_per_second / card.num_cards
            if card.price_per_hour is not None:
                line[PRICE] = card.price(best)
        if card.longest_length is not None:
            line["longest sequence"] = card.longest_length
        lines.append(line)
    forms: dict[str, Form] = {"budget GiB": "{:,.1f}", "predicted MiB": "{:,.0f}", "headroom MiB": "{:,.0f}"}
    forms |= {"seconds per step": short, "tokens/s": "{:,.0f}", "tokens/s a GPU": "{:,.0f}", PRICE: "{:,.2f}"}
    return Table.of(
        "cards",
        "where to start on each card",
        lines,
        forms=forms,
        expendable=("headroom MiB", "budget GiB", "seconds per step", "accumulation"),
    )
