"""How much more CUDA's allocator takes than the longest micro-batch needs, as lengths vary: on a simulated card.

    python benchmarks/varying_lengths.py          trains every configuration for 60 optimizer steps; writes a .csv

It needs .venv-cuda (make .venv-cuda/installed; pipeline/simulation/README.md says what is real on a simulated card).
The documents are parts of the text that every CPython holds; their lengths are log-normal, as those of conversations
are, and few are cut at 1,024 tokens.
"""

import csv
import datetime
import json
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from simulated_card import QUANTITIES, Row, simulated_card

FOLDER = Path(__file__).parent
CARD, MODEL, LENGTH, BATCH, NUM_STEPS = "a100", "gpt2", 1024, 16, 60
NUM_DOCUMENTS = 1500
MEDIAN_WORDS, DEVIATION, MOST_WORDS = 100, 0.8, 900
"""Of the documents' lengths: the median, the standard deviation of the logarithm, and the longest."""
LEVERS: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1, "precision": "bf16"},
    {"micro_batch_size": 2, "precision": "bf16", "loss_kernel": "chunked"},
    {"micro_batch_size": 4, "precision": "fp32"},
    {"micro_batch_size": 8, "precision": "bf16"},
    {"micro_batch_size": 8, "precision": "bf16", "checkpointing": "every_layer"},
)


def write_documents(file: Path) -> None:
    """Write a .jsonl file of documents of different lengths."""
    words, generator = " ".join(topics.values()).split(), np.random.default_rng(0)
    with file.open("w") as lines:
        for _ in range(NUM_DOCUMENTS):
            length = int(min(MOST_WORDS, np.exp(generator.normal(np.log(MEDIAN_WORDS), DEVIATION))))
            start = int(generator.integers(0, len(words) - length))
            lines.write(json.dumps({"text": " ".join(words[start : start + length])}) + "\n")


def cases() -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield whether segments are expandable, and the settings that differ."""
    for expandable in (False, True):
        for sequences in ("padded", "grouped"):
            for levers in LEVERS:
                yield expandable, {"sequences": sequences, **levers}


def rows(documents: Path) -> Iterator[Row]:
    """Yield the predicted and the measured peaks of each configuration."""
    shared = {
        "model": MODEL,
        "sequence_length": LENGTH,
        "effective_batch_size": BATCH,
        "num_steps": NUM_STEPS,
        "corpus": "text_files",
        "text_files.path": str(documents),
    }
    for expandable, group in groupby(cases(), lambda case: case[0]):
        with simulated_card(CARD, expandable_segments=expandable) as card:
            for _, settings in group:
                values = {**shared, **settings, "expandable_segments": expandable}
                found = card.ask(kind="predict", settings=values) | card.ask(kind="measure", settings=values)
                row = {"card": CARD, "model": MODEL, **{k: str(values.get(k, "")) for k in COLUMNS}}
                for name in QUANTITIES:
                    sides = [found[f"{side}_{name}_bytes"] for side in ("predicted", "measured")]
                    row |= dict(
                        zip((f"predicted_{name}_bytes", f"measured_{name}_bytes"), map(str, sides), strict=True)
                    )
                    row[f"{name}_beyond_percent"] = f"{100 * (sides[1] / sides[0] - 1):.4f}"
                print(row, flush=True)
                yield row


COLUMNS = ("sequences", "micro_batch_size", "precision", "checkpointing", "loss_kernel", "expandable_segments")


def main() -> None:
    """Train every configuration, and write the .csv."""
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder) / "documents.jsonl"
        write_documents(documents)
        found = list(rows(documents))
    file = FOLDER / f"varying_lengths_{datetime.date.today()}.csv"
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
