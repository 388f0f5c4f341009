"""The longest sequences that fit, by model, card and micro-batch, fine-tuning adapters.

    python benchmarks/longest_sequences.py                                   writes longest_sequences_<date>.csv and .md
    python benchmarks/longest_sequences.py --adapters qlora                  of another value of `adapter`
    python benchmarks/longest_sequences.py --models qwen3-1.7b --gib 8,24    some of them

Predicted, not measured: `pipeline.longest` in bf16, every layer checkpointed, with a loss in chunks, frozen weights in
bfloat16 and an effective batch of 8 sequences. A row is added to the file as it ends: the same command resumes an
interrupted one.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from exit_code import Deadline, exit_code_of
from journal import Journal
from model_by_card import CARDS, _chosen

from pipeline import longest
from pipeline.base.errors import InvalidInputError
from pipeline.base.published_shapes import SHAPES
from pipeline.base.units import MIB
from pipeline.prediction.cards import assumed_context_bytes, find_card

FOLDER = Path(__file__).parent
GIB = 1024 * MIB
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"adapter": "lora", "weights": "bfloat16"},
    "qlora": {"adapter": "qlora"},
}
SIZES = (1, 4)
"""Micro-batches."""
SHARED: Mapping[str, Any] = {
    "effective_batch_size": 8,
    "precision": "bf16",
    "space": {"micro_batch_size": list(SIZES), "checkpointing": ["every_layer"], "loss_kernel": ["chunked"]},
    "mathematics": "different",
}
COLUMNS = ("model", "gib", "adapter", "card", "budget_gib", "micro_batch_size", "length", "peak_gib", "why")


def main(words: Sequence[str] | None = None) -> int:
    """Search what is left, and write the page; return the exit code, as exit_code_of() does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas between; by default all")
    parser.add_argument("--gib", default=",".join(map(str, CARDS)), help="memory of the cards; by default all")
    parser.add_argument("--adapters", default="lora", help=f"of {', '.join(ADAPTERS)}")
    parser.add_argument("--minutes", type=float, help="begin no search after this many minutes")
    parser.add_argument("--date", default=f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}", help="of the files")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    return exit_code_of(lambda: _run(parser.parse_args(words)))


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    asked = ((given.models, SHAPES), (given.gib, map(str, CARDS)), (given.adapters, ADAPTERS))
    models, sizes, adapters = (_chosen(text, valid) for text, valid in asked)
    name = f"longest_sequences_{given.date}"
    journal = Journal.open(given.folder / f"{name}.csv", COLUMNS, (), {"": json.dumps([torch.__version__, SHARED])})
    done = {(row["model"], row["gib"], row["adapter"]) for row in journal.rows()}
    wanted = [(model, size, adapter) for adapter in adapters for model in models for size in sizes]
    waiting = [one for one in wanted if one not in done]
    while waiting and not deadline.is_over:
        for row in _searched(*waiting.pop(0)):
            journal.add(row)
            print(row, file=sys.stderr, flush=True)
    (given.folder / f"{name}.md").write_text(page(journal.rows()))
    return len(waiting)


def _searched(model: str, gib: str, adapter: str) -> list[dict[str, Any]]:
    """Return a row for each micro-batch."""
    card = CARDS[int(gib)]
    target = find_card(card)
    budget_bytes = min(int(gib) * GIB, target.memory_bytes) - assumed_context_bytes(target)
    row = {"model": model, "gib": gib, "adapter": adapter, "card": card, "budget_gib": f"{budget_bytes / GIB:.2f}"}
    try:
        [found] = longest(
            model=model, gpu=card, budget=f"{budget_bytes // MIB}MiB", **SHARED, **ADAPTERS[adapter]
        ).cards
    except InvalidInputError as error:
        return [{**row, "micro_batch_size": size, "why": str(error).splitlines()[0]} for size in SIZES]
    return [
        {
            **row,
            "micro_batch_size": each.planned.micro_batch_size,
            "length": each.sequence_length or "",
            "peak_gib": f"{each.planned.peak_bytes / GIB:.2f}",
            "why": "" if each.sequence_length else "the shortest does not fit",
        }
        for each in found.rows
    ]


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page as Markdown: a table of models and cards for each adapter."""
    sizes = sorted({int(row["gib"]) for row in rows})
    found = {(row["adapter"], row["model"], int(row["gib"]), int(row["micro_batch_size"])): row for row in rows}
    lines = [
        "# The longest sequences that fit, by model and card",
        "",
        "Written by `python benchmarks/longest_sequences.py`. Predicted: bf16, every layer checkpointed, a loss in",
        "chunks, an effective batch of 8 sequences, AdamW. A cell has the longest sequences in tokens at micro-batch",
        f"{' and '.join(map(str, SIZES))}, - where not even 64 tokens fit; * is all that the model takes. Below 40 GiB",
        "the card is an RTX 4090 under a cap, above an A100.",
    ]
    for adapter in dict.fromkeys(key[0] for key in found):
        models = dict.fromkeys(key[1] for key in found if key[0] == adapter)
        settings = ", ".join(f"{name}={value}" for name, value in ADAPTERS[adapter].items())
        lines += [
            "",
            f"## {settings}",
            "",
            f"| model | {' | '.join(f'{size} GiB' for size in sizes)} |",
            "|---" * (len(sizes) + 1) + "|",
            *(f"| {model} | {' | '.join(_cell(found, adapter, model, size) for size in sizes)} |" for model in models),
        ]
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[tuple[str, str, int, int], Mapping[str, str]], adapter: str, model: str, gib: int) -> str:
    texts = []
    for size in SIZES:
        row = found.get((adapter, model, gib, size))
        length = "?" if row is None else row["length"] or "-"
        limit = SHAPES[model].get("max_position_embeddings", 1024)
        texts.append(f"{length}*" if length == str(limit // 64 * 64) else length)
    return " / ".join(texts)


if __name__ == "__main__":
    sys.exit(main())
