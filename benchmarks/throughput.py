"""How far estimated tokens a second of sharded training are from published ones: llm-foundry's tables, without a GPU.

    python benchmarks/throughput.py                 simulates rank 0 of every row, writes throughput_<date>.csv and .md
    python benchmarks/throughput.py --models 1b,7b  some models alone; what the .csv has already is not simulated again

A row is a GPT of llm-foundry's shape under FSDP2, with published micro-batch, recomputation and number of GPUs. Rows in
float8 are left out, which Fitproof does not train. One machine is linked by its NVLink, several by what was published
(A100: 1,600 Gb/s for each machine) or is assumed (H100: eight ports of 400 Gb/s). Estimates are compared as they are,
and after one constant for a machine: the median ratio of all other models.
"""

import argparse
import csv
import datetime
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rows import after_constant
from scipy.stats import spearmanr
from transformers import AutoConfig

from pipeline.base.contracts import Hardware
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.planning.rates import cost_prior, links_of
from pipeline.planning.step_time import StepTime, estimated
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict_each
from pipeline.prediction.prediction import Prediction

FOLDER = Path(__file__).parent
PUBLISHED = FOLDER / "published" / "llm_foundry.csv"
ROOM = 1 << 50
VOCABULARY = 50368
SHAPES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width and heads of llm-foundry's yamls/pretrain/mpt-*.yaml (8c8dd48)."""
CARDS = {"H100 80GB": "h100", "A100 80GB": "a100", "A100 40GB": "a100-40gb"}
ESTIMATES = ("overlapped", "expected", "serial")
"""All that ranks send overlaps with computing, what `plan` expects, and nothing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published row with the seconds of an optimizer step that were estimated for it."""

    card: str
    model: str
    sequence_length: int
    gpus: int
    micro_batch_size: int
    accumulation_steps: int
    sharding: str
    checkpointing: str
    published: float
    """Tokens a second of one GPU."""
    overlapped_seconds: float = 0.0
    serial_seconds: float = 0.0

    @property
    def key(self) -> tuple[object, ...]:
        """The columns of the published row."""
        return tuple(asdict(self).values())[:-2]

    def estimate(self, name: str) -> float:
        """Return the estimated tokens a second of one GPU."""
        expected = StepTime(
            overlapped_seconds=self.overlapped_seconds, serial_seconds=self.serial_seconds, deviation=0
        ).seconds
        seconds = {"overlapped": self.overlapped_seconds, "expected": expected, "serial": self.serial_seconds}[name]
        return self.sequence_length * self.micro_batch_size * self.accumulation_steps / seconds


def published() -> Iterator[Row]:
    """Yield the published rows that can be expressed."""
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            if "fp8" not in row["precision"]:
                yield Row(
                    **{name: row[name] for name in ("card", "model", "sharding", "checkpointing")},
                    **{name: int(row[name]) for name in ("sequence_length", "gpus")},
                    **{name: int(row[name]) for name in ("micro_batch_size", "accumulation_steps")},
                    published=float(row["tokens_per_second_per_gpu"]),
                )


def experiment_of(row: Row, folder: Path) -> Experiment:
    """Return our own training of a row; `folder` gets the model's configuration."""
    layers, width, heads = SHAPES[row.model]
    name = folder / f"{row.model}-{row.sequence_length}"
    config = AutoConfig.for_model(
        "gpt2",
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=row.sequence_length,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        vocab_size=VOCABULARY,
        activation_function="gelu",
        architectures=["GPT2LMHeadModel"],
    )
    config.save_pretrained(name)
    effective = row.micro_batch_size * row.accumulation_steps * row.gpus
    settings = {
        "model": str(name),
        "device": "cpu",
        "corpus": "quick_fox",
        "dataset_size": effective,
        "eval_steps": 0,
        "precision": "bf16",
        "sharding": "fsdp",
        "reshard_after_forward": row.sharding == "FULL_SHARD",
        "checkpointing": "every_layer" if row.checkpointing == "True" else "none",
        "world_size": row.gpus,
        "effective_batch_size": effective,
        **{name: getattr(row, name) for name in ("sequence_length", "micro_batch_size", "accumulation_steps")},
    }
    return make_experiment(settings, "main")


def simulate(rows: Sequence[Row], table: Path) -> None:
    """Add the rows that a table lacks to it, each as soon as it is simulated."""
    known = {row.key for row in read(table)}
    for card in CARDS:
        missing = [row for row in rows if row.card == card and row.key not in known]
        target = replace(find_hardware(CARDS[card]), memory_bytes=ROOM)
        with tempfile.TemporaryDirectory() as folder:
            experiments = [experiment_of(row, Path(folder)) for row in missing]
            for number, outcome in predict_each(experiments, target, budget_bytes=ROOM):
                if isinstance(outcome, Prediction):
                    append(table, timed(missing[number], outcome, find_hardware(CARDS[card])))
                else:
                    print(missing[number], outcome)


def timed(row: Row, prediction: Prediction, card: Hardware) -> Row:
    """Return the row with its estimated seconds."""
    time = estimated(prediction, row.accumulation_steps, cost_prior(card, links_of(card)))
    return replace(row, overlapped_seconds=time.overlapped_seconds, serial_seconds=time.serial_seconds)


def read(table: Path) -> list[Row]:
    """Return the rows of a table; none if there is no such file."""
    if not table.exists():
        return []
    kinds = {each.name: each.type for each in fields(Row)}
    with table.open(newline="") as file:
        return [Row(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]


def append(table: Path, row: Row) -> None:
    """Add a row to a table."""
    values = asdict(row) | {name: f"{getattr(row, name):.6g}" for name in ("overlapped_seconds", "serial_seconds")}
    is_new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


def fitted_ratios(rows: Sequence[Row], name: str) -> dict[Row, float]:
    """Return estimated over published tokens a second of one card, after the constant of all other models."""
    return after_constant({row: row.estimate(name) / row.published for row in rows}, lambda row: row.model)


def page(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the comparison."""
    yield "# Published and estimated throughput\n"
    yield (
        "Tokens a second of one GPU: llm-foundry's tables (published/llm_foundry.csv) against rank 0 on a simulated "
        "card, `benchmarks/throughput.py`. The constant is the median ratio of all other models on the card.\n"
    )
    yield "| card | what ranks send | rows | rank correlation | median error | after one constant | worst after it |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    by_card = {card: [row for row in rows if row.card == card] for card in CARDS}
    for card, those in by_card.items():
        if len({row.model for row in those}) < 2:  # no other model
            continue
        for name in ESTIMATES:
            errors = [abs(row.estimate(name) / row.published - 1) for row in those]
            fitted = [abs(ratio - 1) for ratio in fitted_ratios(those, name).values()]
            rank = spearmanr([row.published for row in those], [row.estimate(name) for row in those]).statistic
            yield (
                f"| {card} | {name} | {len(those)} | {rank:.3f} | {statistics.median(errors):.1%} | "
                f"{statistics.median(fitted):.1%} | {max(fitted):.1%} |"
            )
    yield "\nWhat is expected, after its constant, by model:\n"
    yield "| card | model | rows | median of estimated / published | least | most |"
    yield "|---|---|---:|---:|---:|---:|"
    for card, those in by_card.items():
        if len({row.model for row in those}) > 1:
            yield from _by_model(card, fitted_ratios(those, "expected"))


def _by_model(card: str, ratios: Mapping[Row, float]) -> Iterator[str]:
    for model in SHAPES:
        own = [ratio for row, ratio in ratios.items() if row.model == model]
        if own:
            yield f"| {card} | {model} | {len(own)} | {statistics.median(own):.2f} | {min(own):.2f} | {max(own):.2f} |"


def main() -> None:
    """Simulate what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas between; by default all")
    parser.add_argument("--table", type=Path, default=FOLDER / f"throughput_{datetime.datetime.now():%Y-%m-%d}.csv")
    words = parser.parse_args()
    simulate([row for row in published() if row.model in words.models.split(",")], words.table)
    words.table.with_suffix(".md").write_text("\n".join(page(read(words.table))) + "\n")


if __name__ == "__main__":
    main()
