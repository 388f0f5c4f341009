"""litgpt's published memory and minutes of fine-tuning on one A10G, and what its own program on a simulated one says.

    python benchmarks/litgpt_minutes.py TABLE.csv --python ENVIRONMENT/bin/python --checkout LITGPT

It appends the rows that the table does not have. The interpreter is of an environment with torch's CUDA build and what
litgpt needs; its program and settings are those of the checkout. Weights are random and stay unloaded, and a sample has
one length: the longest that the settings admit for the memory, which is bytes allocated, and 128 tokens for the time.
That is the mean of Alpaca by the bytes of its files, at four to a token; the lengths of the 2,000 samples of which the
minutes were measured are not at hand, nor how far a micro-batch was padded. Validation counts as forward passes of its
100 samples, a half of a pass with adapters and a third of one without; the example that is generated each time is not
part of the estimate. Of the micro-batches of an optimizer step two are simulated for the memory, and one for the time:
others repeat the second.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rows import add_missing, after_constant
from scipy.stats import spearmanr

from pipeline.planning.rates import cost_prior
from pipeline.planning.step_time import time_of
from pipeline.prediction import cards
from pipeline.prediction.commands.simulation import WORK_HOOK, Simulation, Verdict, simulate
from pipeline.simulation.cards import find_card
from pipeline.simulation.run import Simulate, with_room

PUBLISHED = Path(__file__).parent / "published" / "litgpt.csv"
GPU = "a10g"
GB = 1e9
NUM_SAMPLES = 1900
"""Samples that are trained of the 2,000; the others are for validation."""
NUM_VALIDATED = 100
LENGTH = 128
"""Tokens of a sample for the time: the files of Alpaca on the hub have 918 bytes a sample, which are twice its text and
once the prompt around it, so that a sample in its prompt has about 550."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published training and its simulation; seconds of both runs together on a shared machine."""

    config: str
    model: str
    published_gb: float | None
    """None: it ran out of memory."""
    simulated_gb: float | None
    difference_percent: float | None
    published_minutes: float | None
    training_minutes: float | None
    """Estimated, without validation."""
    estimated_minutes: float | None
    """With it."""
    verdict: str
    torch: str
    seconds: float


def published() -> dict[str, dict[str, str]]:
    """Return the published rows by the name of their settings."""
    with PUBLISHED.open(newline="") as file:
        return {row["config"]: row for row in csv.DictReader(file)}


def run(config: str, python: Path, checkout: Path) -> Row:
    """Simulate a published training: with its longest samples on its card, and with typical ones on one with room."""
    row, begin = published()[config], time.monotonic()
    micro_batch_size, effective_batch_size = int(row["micro_batch_size"]), int(row["effective_batch_size"])
    num_passes = effective_batch_size // micro_batch_size
    num_steps = int(row["epochs"]) * NUM_SAMPLES / effective_batch_size
    card, settings = find_card(GPU), checkout / "config_hub" / "finetune" / row["config"]
    base = Simulate(command=(str(python), __file__, "--train", row["model"], str(settings)), card=card)
    seen = str(micro_batch_size * min(2, num_passes))
    memory = _simulated(replace(base, command=(*base.command, row["sequence_length"], seen)))
    of_time = replace(with_room(base), command=(*base.command, str(LENGTH), str(micro_batch_size)), hook=WORK_HOOK)
    timed, prior, step_seconds = _simulated(of_time), cost_prior(cards.find_hardware(GPU)), None
    if timed.passes_work is not None and timed.update_work is not None:
        step_seconds = time_of([(num_passes, timed.passes_work), (1, timed.update_work)], prior).seconds
    published_gb, minutes = (float(row[name]) if row[name] else None for name in ("peak_gb", "minutes"))
    fits = memory.verdict is Verdict.FITS and memory.largest is not None
    simulated_gb = memory.largest.peak_allocated_bytes / GB if fits and memory.largest else None
    both = simulated_gb and published_gb
    training_minutes = step_seconds and num_steps * step_seconds / 60
    return Row(
        config=config,
        model=row["model"],
        published_gb=published_gb,
        simulated_gb=simulated_gb and round(simulated_gb, 2),
        difference_percent=round(100 * (simulated_gb / published_gb - 1), 1) if both else None,  # type: ignore[operator]
        published_minutes=minutes,
        training_minutes=training_minutes and round(training_minutes, 2),
        estimated_minutes=training_minutes and round(with_validation(row, training_minutes), 2),
        verdict=memory.verdict.value,
        torch=memory.assumptions.get("torch", ""),
        seconds=round(time.monotonic() - begin, 1),
    )


def with_validation(row: dict[str, str], training_minutes: float) -> float:
    """Return the minutes of a published training with those of validating, now and then and at the end."""
    num_trained = int(row["epochs"]) * NUM_SAMPLES
    num_validations = num_trained // int(row["effective_batch_size"]) // int(row["validation_interval"]) + 1
    forward_share = 1 / 3 if Path(row["config"]).stem == "full" else 1 / 2  # frozen weights have no gradient
    return training_minutes * (1 + num_validations * NUM_VALIDATED * forward_share / num_trained)


def _simulated(wanted: Simulate) -> Simulation:
    with tempfile.TemporaryDirectory() as folder:
        return simulate(wanted, Path(folder), finds_smallest=False)


def train(model: str, settings: str, length: str, effective_batch_size: str) -> None:
    """Train as litgpt's command does, with made-up samples and without a checkpoint's weights."""
    import litgpt.utils
    from litgpt.__main__ import main
    from litgpt.config import Config
    from litgpt.finetune import full, lora
    from litgpt.prompts import PromptStyle
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = Path(tempfile.mkdtemp())
    checkpoint = folder / "checkpoint" / model
    checkpoint.mkdir(parents=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "word": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106  # a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(special))
    litgpt.utils.save_config(Config.from_name(model), checkpoint)
    (checkpoint / "lit_model.pth").touch()
    prompt = len(PromptStyle.from_name("alpaca").apply("word").split())
    sample = {"instruction": "word", "output": " ".join(["word"] * (int(length) - prompt - 1))}  # 1: the end's token
    (folder / "samples.json").write_text(json.dumps([sample] * 400))
    for module in (full, lora):
        module.load_checkpoint = lambda *_, **__: None
    kind = "finetune_full" if Path(settings).stem == "full" else "finetune_lora"
    data = ("--data", "JSON", "--data.json_path", str(folder / "samples.json"), "--data.num_workers", "0")
    others = ("--train.global_batch_size", effective_batch_size, "--out_dir", str(folder / "out"))
    sys.argv = ["litgpt", kind, "--config", settings, str(checkpoint), *data, *others]
    main()


def summary(table: Path) -> str:
    """Return how far the estimated minutes of a table are from the published ones."""
    with table.open(newline="") as file:
        rows = {
            row["config"]: row for row in csv.DictReader(file) if row["estimated_minutes"] and row["published_minutes"]
        }
    minutes = [[float(row[f"{name}_minutes"]) for row in rows.values()] for name in ("published", "estimated")]
    ratios = {name: estimated / given for name, given, estimated in zip(rows, *minutes, strict=True)}
    fitted = after_constant(ratios, lambda name: rows[name]["model"])
    before, after = (statistics.median(abs(ratio - 1) for ratio in each.values()) for each in (ratios, fitted))
    worst = max(fitted, key=lambda name: abs(fitted[name] - 1))
    return (
        f"{len(rows)} rows: rank correlation {spearmanr(*minutes).statistic:.3f}, median error {before:.1%}, after one "
        f"constant {after:.1%}, worst after it {worst} with {fitted[worst] - 1:+.1%}"
    )


def main() -> None:
    """Run what the table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    for name in ("python", "checkout"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", default="", help="what the names of rows contain")
    words = parser.parse_args()
    python, checkout = words.python.absolute(), words.checkout.absolute()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    names = [name for name in published() if words.only in name]
    add_missing(words.table, Row, names, lambda name: run(name, python, checkout))
    print(summary(words.table))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(*sys.argv[2:])
    else:
        main()
