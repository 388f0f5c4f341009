"""The fastest configuration that fits, by model and by the card's memory: with three levers, and with all.

    python benchmarks/model_by_card.py                             writes model_by_card_<date>.csv and .md
    python benchmarks/model_by_card.py --models gpt2-xl --gib 24   some of them
    python benchmarks/model_by_card.py --tiny --folder F           tiny models, to try the script

Predicted, not measured: `fitproof.plan` for AdamW in float32 at an effective batch of 8 x 1,024 tokens. A plan is added
to the file as it ends: the same command resumes an interrupted one. gpt2-medium takes minutes, larger models more.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser
from journal import Journal

from fitproof import plan
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.config.settings import AllSettings
from pipeline.planning.plan import CardPlan
from pipeline.prediction.cards import assumed_context_bytes, find_hardware

GIB = 1024 * MIB
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-3.2-1b", "llama-3.2-3b", "llama-7b")
CARDS = {8: "rtx4090", 12: "rtx4090", 16: "rtx4090", 24: "rtx4090", 40: "a100-40gb", 80: "a100"}
"""The card whose rates and kernels stand for one of so many GiB; smaller ones are a cap on an RTX 4090."""
SHARED: Mapping[str, Any] = {"effective_batch_size": 8, "sequence_length": 1024, "max_grad_norm": None}
TINY: Mapping[str, Any] = {"sequence_length": 64, "causal_lm": {"num_layers": 2}}
SPACES: Mapping[str, Mapping[str, Any]] = {
    "three": {
        "space": {
            "micro_batch_size": "divisors",
            "checkpointing": ["none", "every_layer", "every_2_layers"],
            "precision": "auto",
        }
    },
    "all": {"attention": "sdpa"},
}
"""The levers: the three of before, and those of experiments/plan.yaml but for eager attention, which stores more."""
COLUMNS = (
    *("model", "gib", "levers", "card", "budget_gib", "configurations", "choice", "micro_batch_size"),
    *("peak_gib", "tokens_per_second", "deviation", "reasons"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Plan what is left, and write the page; return the exit code, as exit_code_of() does."""
    parser = files_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between; by default all")
    parser.add_argument("--gib", default=",".join(map(str, CARDS)), help="memory of the cards; by default all")
    parser.add_argument("--tiny", action="store_true", help="two layers of each model")
    parser.add_argument("--minutes", type=float, help="begin no plan after this many minutes")
    return exit_code_of(lambda: _run(parser.parse_args(words)))


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    models, sizes = (_chosen(text, valid) for text, valid in ((given.models, MODELS), (given.gib, map(str, CARDS))))
    name = f"model_by_card_{'tiny_' if given.tiny else ''}{given.date}"
    shared = {**SHARED, **(TINY if given.tiny else {})}
    journal = Journal.open(given.folder / f"{name}.csv", COLUMNS, (), {"": json.dumps([torch.__version__, shared])})
    done = {(row["model"], row["gib"], row["levers"]) for row in journal.rows()}
    wanted = [(model, size, levers) for model in models for size in sizes for levers in SPACES]
    waiting = [one for one in wanted if one not in done]
    while waiting and not deadline.is_over:
        model, size, levers = waiting.pop(0)
        row = _planned(model, int(size), levers, shared)
        journal.add(row)
        print({key: value for key, value in row.items() if key != "reasons"}, file=sys.stderr, flush=True)
    (given.folder / f"{name}.md").write_text(page(journal.rows()))
    return len(waiting)


def _chosen(text: str, valid: Any) -> list[str]:
    """Return the names in a text, in the order of the valid ones."""
    names, known = {name.strip() for name in text.split(",")}, list(valid)
    if not names <= {*known}:
        raise InvalidInputError(f"{min(names - {*known})} is not one of {', '.join(known)}; choose among them")
    return [name for name in known if name in names]


def _planned(model: str, gib: int, levers: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the fastest configuration that is expected to fit; without a choice if none does."""
    card = CARDS[gib]
    own = find_hardware(card).memory_bytes
    budget_bytes = min(gib * GIB, own) - assumed_context_bytes(find_hardware(card))
    settings = {**shared, **SPACES[levers], "gpu": card, "budget": f"{budget_bytes // MIB}MiB"}
    row = {"model": model, "gib": gib, "levers": levers, "card": card, "budget_gib": f"{budget_bytes / GIB:.2f}"}
    try:
        [found] = plan(model=model, **settings).cards
    except InvalidInputError as error:  # the parameters alone exceed the budget
        return {**row, "configurations": "", "reasons": str(error).splitlines()[0]}
    return {**row, "configurations": len(found.rows), **_recommended(found)}


def _recommended(found: CardPlan) -> dict[str, Any]:
    best = found.recommended
    if best is None:
        return {"choice": "", "reasons": "nothing fits"}
    defaults = {name: field.default for name, field in AllSettings.model_fields.items()}
    changed = {n: v for n, v in best.choice.items() if n != "micro_batch_size" and v != defaults.get(n)}
    return {
        "choice": ", ".join(f"{name}={value}" for name, value in changed.items()) or "plain",
        "micro_batch_size": best.micro_batch_size,
        "peak_gib": f"{best.peak_bytes / GIB:.2f}",
        "tokens_per_second": f"{best.tokens_per_second:.0f}",
        "deviation": f"{best.deviation:.2f}",
        "reasons": " ".join(found.reasons),
    }


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page as Markdown: the table of models and cards, then each choice with its reasons."""
    sizes = sorted({int(row["gib"]) for row in rows})
    found = {(row["model"], int(row["gib"]), row["levers"]): row for row in rows}
    models = [model for model in MODELS if any(model == key[0] for key in found)]
    lines = [
        "# The fastest configuration that fits, by model and card",
        "",
        "Written by `python benchmarks/model_by_card.py`. Predicted: AdamW with float32 weights and states, an",
        "effective batch of 8 x 1,024 tokens, no clipping. A cell has the micro-batch and the estimated tokens a",
        "second, with the levers precision, accumulation and checkpointing, then with all but eager attention; - where",
        "nothing fits. Below 40 GiB the speed is an RTX 4090's under a cap, above an A100's.",
        "",
        f"| model | {' | '.join(f'{size} GiB' for size in sizes)} |",
        "|---" * (len(sizes) + 1) + "|",
        *(f"| {model} | {' | '.join(_cell(found, model, size) for size in sizes)} |" for model in models),
        "",
        "| model | GiB | levers | configurations | choice | micro-batch | peak GiB | tokens/s | deviation | reasons |",
        "|---|---:|---|---:|---|---:|---:|---:|---:|---|",
        *(f"| {' | '.join(row[name] for name in COLUMNS if name not in ('card', 'budget_gib'))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[tuple[str, int, str], Mapping[str, str]], model: str, size: int) -> str:
    """Return `micro-batch: tokens/s` before and after."""
    texts = []
    for levers in SPACES:
        row = found.get((model, size, levers))
        fits = row is not None and row["tokens_per_second"]
        texts.append(f"{row['micro_batch_size']}: {int(row['tokens_per_second']):,}" if row and fits else "-")
    return " → ".join(texts)


if __name__ == "__main__":
    sys.exit(main())
