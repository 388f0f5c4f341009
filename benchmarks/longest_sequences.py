"""The longest sequences that fit, by model, memory and micro-batch, fine-tuning adapters.

    python benchmarks/longest_sequences.py                                   writes longest_sequences_<date>.csv and .md
    python benchmarks/longest_sequences.py --adapters qlora                  of another value of `adapter`
    python benchmarks/longest_sequences.py --models qwen3-1.7b --gib 8,24    some of them

Predicted, not measured: bf16, every layer checkpointed, a loss in chunks, frozen weights in bfloat16 and an effective
batch of 8 sequences, on an A100 of which so many GiB may be used. Lengths are 1, 1 1/4, 1 1/2 and 1 3/4 times a power
of two: a length needs a prediction of its own, which serves all sizes of memory (`fitproof plan --sequence_length auto`
tries every multiple of 64). The rows of a model are added to the file as they end: the same command resumes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch
from exit_code import Deadline, exit_code_of, files_parser
from journal import Journal
from model_by_card import _chosen

from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.models._support.published_shapes import SHAPES
from pipeline.planning.longest import largest_length
from pipeline.prediction.cards import assumed_context_bytes, find_hardware
from pipeline.prediction.fake_batches import OfLength
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction

GIB = 1024 * MIB
CARD = "a100"
MEMORY_GIB = (8, 12, 16, 24, 40, 80)
MODELS = tuple(name for name in SHAPES if not name.startswith("gpt2") and name != "llama-7b")
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"adapter": "lora", "weights": "bfloat16"},
    "qlora": {"adapter": "qlora"},
}
SIZES = (1, 4)
"""Micro-batches."""
SHARED: Mapping[str, Any] = {
    "effective_batch_size": 8,
    "precision": "bf16",
    "checkpointing": "every_layer",
    "loss_kernel": "chunked",
    "device": "cpu",
    "sequence_length": 64,
}
LENGTHS = (64, 128, 192, *(2**power // 4 * quarters for power in range(8, 18) for quarters in (4, 5, 6, 7)))
FIRST_TOKENS = 4096
"""Tokens of the micro-batch that is predicted beside the shortest one, to expect what others need."""
COLUMNS = ("model", "adapter", "micro_batch_size", "gib", "budget_gib", "length", "peak_gib")


def main(words: Sequence[str] | None = None) -> int:
    """Search what is left, and write the page; return the exit code, as exit_code_of() does."""
    parser = files_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between; by default all")
    parser.add_argument("--gib", default=",".join(map(str, MEMORY_GIB)), help="sizes of memory; by default all")
    parser.add_argument("--adapters", default=",".join(ADAPTERS), help="by default all")
    parser.add_argument("--processes", type=int, default=1, help="models that are searched at once")
    parser.add_argument("--minutes", type=float, help="begin no search after this many minutes")
    return exit_code_of(lambda: _run(parser.parse_args(words)))


def _run(given: argparse.Namespace) -> int:
    deadline = Deadline(given.minutes)
    asked = ((given.models, MODELS), (given.gib, map(str, MEMORY_GIB)), (given.adapters, ADAPTERS))
    models, sizes, adapters = (_chosen(text, valid) for text, valid in asked)
    name = f"longest_sequences_{given.date}"
    conditions = json.dumps([torch.__version__, SHARED, ADAPTERS, LENGTHS])
    journal = Journal.open(given.folder / f"{name}.csv", COLUMNS, (), {"": conditions})
    done = {(row["model"], row["adapter"], int(row["gib"])) for row in journal.rows()}
    left = {
        (model, adapter): [gib for gib in map(int, sizes) if (model, adapter, gib) not in done]
        for model in models
        for adapter in adapters
    }
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        waiting = {pool.submit(searched, *key, gib, deadline) for key, gib in left.items() if gib}
        for ended in as_completed(waiting):
            for row in ended.result():
                journal.add(row)
                print(row, file=sys.stderr, flush=True)
    rows = journal.rows()
    (given.folder / f"{name}.md").write_text(page(rows))
    found = {(row["model"], row["adapter"], int(row["gib"])) for row in rows}
    return sum((*key, gib) not in found for key, each in left.items() for gib in each)


@dataclass
class Lengths:
    """The lengths of a model's sequences, and the predictions that are known of some of them."""

    experiment: Experiment
    lengths: Sequence[int]
    known: dict[int, Prediction] = field(default_factory=dict)
    """By the index of the length."""

    def predicted(self, number: int) -> Prediction:
        """Return the prediction of a length."""
        if number not in self.known:
            length, prepared = self.lengths[number], self.experiment.read_corpus()
            settings = self.experiment.settings.model_copy(update={"sequence_length": length})
            rows = OfLength(prepared.train, length)
            example = replace(prepared, train=rows, held_out=rows)
            self.known[number] = predict(Experiment(settings), find_hardware(CARD), example)
        return self.known[number]

    def longest(self, budget_bytes: int) -> int | None:
        """Return the index of a length that fits where the next one does not; None if the shortest does not."""
        low, high = -1, len(self.lengths)
        while high - low > 1 and not self._is_beyond(low, budget_bytes):
            number = min(max(self._expected(budget_bytes), low + 1), high - 1)
            if self.predicted(number).fits(budget_bytes):
                low = number
            else:
                high = number
        return None if low < 0 else low

    def _is_beyond(self, low: int, budget_bytes: int) -> bool:
        """Whether the length after one that fits needs more than the budget, on the line through known shorter ones.

        The peak is the largest of sums that grow linearly with the length, so it is above the line beyond them.
        """
        return sum(number <= low for number in self.known) >= 2 and self._line(low + 1, low) > budget_bytes

    def _expected(self, budget_bytes: int) -> int:
        """Return the last length whose allocated bytes are in the budget, on the line through the known ones before."""
        fitting = [number for number, one in self.known.items() if one.peak_allocated_bytes <= budget_bytes]
        last = max(sorted(self.known)[1], max(fitting, default=0))
        return sum(self._line(number, last) <= budget_bytes for number in range(len(self.lengths))) - 1

    def _line(self, number: int, last: int) -> float:
        """Return the allocated bytes of a length on the line through the two longest known ones up to the last."""
        (x, y), (other_x, other_y) = (
            (self.lengths[known], self.known[known].peak_allocated_bytes)
            for known in sorted(known for known in self.known if known <= last)[-2:]
        )
        return y + (self.lengths[number] - x) * (other_y - y) / (other_x - x)


def searched(model: str, adapter: str, memory_gib: Sequence[int], deadline: Deadline) -> list[dict[str, Any]]:
    """Return a row for each micro-batch and size of memory; none if the time is over."""
    if deadline.is_over:
        return []
    card, rows = find_hardware(CARD), []
    for size in SIZES:
        settings = {**SHARED, **ADAPTERS[adapter], "model": model, "micro_batch_size": size}
        experiment = make_experiment(settings, "main")
        tried = Lengths(experiment, [length for length in LENGTHS if length <= largest_length(experiment)])
        for number in (0, sum(length * size <= FIRST_TOKENS for length in tried.lengths) - 1):
            tried.predicted(number)
        for gib in sorted(memory_gib):
            budget_bytes = min(gib * GIB, card.memory_bytes) - assumed_context_bytes(card)
            found = tried.longest(budget_bytes)
            rows.append(
                {
                    "model": model,
                    "adapter": adapter,
                    "micro_batch_size": size,
                    "gib": gib,
                    "budget_gib": f"{budget_bytes / GIB:.2f}",
                    "length": 0 if found is None else tried.lengths[found],
                    "peak_gib": f"{tried.predicted(found or 0).peak_bytes / GIB:.2f}",
                }
            )
    return rows


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page as Markdown: a table of models and memory for each adapter."""
    sizes = sorted({int(row["gib"]) for row in rows})
    lines = [
        "# The longest sequences that fit, by model and memory",
        "",
        "Written by `python benchmarks/longest_sequences.py`. Predicted for an A100 of which so many GiB may be used,",
        f"less its CUDA context ({assumed_context_bytes(find_hardware(CARD)) / GIB:.1f} GiB): bf16, every layer",
        "checkpointed, a loss in chunks, an effective batch of 8 sequences, AdamW. A cell has the longest sequences,",
        f"in tokens, at micro-batch {' and '.join(map(str, SIZES))}, - where not even 64 tokens fit; * is all that",
        "the model takes. The lengths tried are 64, 128, 192, then 1, 1 1/4, 1 1/2 and 1 3/4 times a power of two:",
        "the next one does not fit.",
    ]
    for adapter in dict.fromkeys(row["adapter"] for row in rows):
        settings = ", ".join(f"{name}={value}" for name, value in ADAPTERS[adapter].items())
        lines += [
            "",
            f"## {settings}",
            "",
            f"| model | {' | '.join(f'{size} GiB' for size in sizes)} |",
            "|---" * (len(sizes) + 1) + "|",
            *_lines([row for row in rows if row["adapter"] == adapter], sizes),
        ]
    return "\n".join(lines) + "\n"


def _lines(rows: Sequence[Mapping[str, str]], sizes: Sequence[int]) -> Iterator[str]:
    """Yield a line for each model, in the order of SHAPES."""
    found = {(row["model"], int(row["gib"]), int(row["micro_batch_size"])): int(row["length"]) for row in rows}
    for model in (name for name in SHAPES if any(key[0] == name for key in found)):
        limit = SHAPES[model].get("max_position_embeddings", 1024)
        cells = (" / ".join(_cell(found.get((model, gib, size)), limit) for size in SIZES) for gib in sizes)
        yield f"| {model} | {' | '.join(cells)} |"


def _cell(length: int | None, limit: int) -> str:
    if length is None:
        return "?"
    return f"{length:,}{'*' * (length == limit)}" if length else "-"


if __name__ == "__main__":
    sys.exit(main())
