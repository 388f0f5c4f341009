"""The answer of `fitproof search -- COMMAND` beside the best of an exhaustive run, for four frameworks on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/command_search.py                 writes command_search_cpu_<date>.csv and .md
    python benchmarks/command_search.py --only 'Trainer|Lightning' --repeats 1 --folder F     a part, to try it

Each configuration of a small space is run for NUM_STEPS optimizer steps in REPEATS rounds of random order, frameworks
and configurations mixed. The search comes after the first round, whose median peak is its budget, so that half of the
space fits. The time of a configuration is that of its least disturbed run. The .csv has every run, the .md the table;
both are written after each round.
"""

import argparse
import csv
import datetime
import json
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.base.units import MIB
from pipeline.report.findings import read_findings
from pipeline.runtime.environment import environment
from pipeline.runtime.run import execute
from pipeline.searching.command_problem import CommandProblem, make_command_problem
from pipeline.searching.results import SearchFindings
from pipeline.searching.trials import label

FOLDER = Path(__file__).parent
NUM_STEPS, NUM_WARMUP_STEPS = 12, 2
EFFECTIVE_BATCH_SIZE = 32
REPEATS = 3
OPTIONS = "--output_dir out --max_steps 100 --report_to none --use_cpu true --save_strategy no"
BATCH = "--batch {micro_batch_size} --accumulate {accumulation_steps}"
WORDS = ("the", "model", "reads", "a", "row", "of", "words", "and", "learns")


@dataclass(frozen=True)
class Case:
    """A command, and the values of its space."""

    command: str
    space: Mapping[str, Sequence[Any]]

    def problem(self, budget: str) -> CommandProblem:
        """Return its search."""
        return make_command_problem({"command": self.command, "space": dict(self.space), **settings(budget)})


CASES = {
    "plain PyTorch": Case(
        f"{sys.executable} train.py {BATCH} --dtype {{dtype:fp32,bf16}}", {"micro_batch_size": (4, 8, 16, 32)}
    ),
    "Trainer": Case(
        f"{sys.executable} trainer_script.py {OPTIONS}",
        {"micro_batch_size": (8, 32), "gradient_checkpointing": ("false", "true"), "bf16": ("false", "true")},
    ),
    "trl sft": Case(
        f"{shlex.quote(str(Path(sys.executable).parent / 'trl'))} sft --model_name_or_path nano --dataset_name rows "
        f"{OPTIONS} --seed 0",
        {"micro_batch_size": (8, 32), "gradient_checkpointing": ("true", "false"), "bf16": ("true", "false")},
    ),
    "Lightning's CLI": Case(
        f"{sys.executable} lightning_script.py fit --trainer.accelerator cpu --trainer.max_steps 100 "
        "--trainer.enable_progress_bar false",
        {"micro_batch_size": (4, 8, 16, 32), "trainer.precision": ("32-true", "bf16-mixed")},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one configuration."""

    framework: str
    configuration: str
    repeat: int
    outcome: str
    peak_mib: float
    step_seconds: float
    """Median of an optimizer step."""
    seconds: float
    """Of the whole process."""


def settings(budget: str) -> dict[str, Any]:
    """Return the settings of a search."""
    return {
        "effective_batch_size": EFFECTIVE_BATCH_SIZE,
        "budget": budget,
        "device": "cpu",
        "num_steps": NUM_STEPS,
        "timing_warmup_steps": NUM_WARMUP_STEPS,
    }


def write_programs(folder: Path) -> None:
    """Write the scripts, and for TRL a model of two layers with its tokenizer and conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shutil.copy(FOLDER.parent / "tests" / "commands" / "train.py", folder)
    for script in (FOLDER / "commands").glob("*.py"):
        shutil.copy(script, folder)
    source = random.Random(0)  # noqa: S311
    texts = [" ".join(source.choices(WORDS, k=48)) for _ in range(2048)]
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    )
    ends = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder / "nano")
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=256, **shape)).save_pretrained(folder / "nano")


def measure(framework: str, problem: CommandProblem, number: int, repeat: int) -> Run:
    """Run one configuration in a process of its own, with no end before its last step."""
    choice = problem.space.choices[number]
    with tempfile.TemporaryDirectory() as folder:
        result = execute(problem.runnable(choice), Path(folder) / "log")
    seconds = [record.seconds for record in result.steps][NUM_WARMUP_STEPS:]
    return Run(
        framework=framework,
        configuration=label(choice),
        repeat=repeat,
        outcome=result.outcome.value,
        peak_mib=round((result.memory.peak_allocated_bytes or 0) / MIB if result.memory else 0.0, 1),
        step_seconds=round(statistics.median(seconds), 5) if seconds else float("nan"),
        seconds=round(result.seconds_total, 1),
    )


def measure_all(names: Sequence[str], repeat: int) -> list[Run]:
    """Run every configuration once, in random order."""
    problems = {name: CASES[name].problem("100%") for name in names}
    pairs = [(name, number) for name, one in problems.items() for number in range(len(one.space.choices))]
    runs = []
    for name, number in random.Random(repeat).sample(pairs, len(pairs)):  # noqa: S311
        runs.append(measure(name, problems[name], number, repeat))
        print(runs[-1], flush=True)
    return runs


def search(case: Case, budget: str) -> SearchFindings:
    """Search as a user does, and return what was found."""
    options = [part for name, value in settings(budget).items() for part in (f"--{name}", str(value))]
    command = ["search", *options, "--space", json.dumps(case.space), "--", *shlex.split(case.command)]
    subprocess.run([sys.executable, "-m", "fitproof", *command], check=True)
    findings = read_findings(max(Path("runs").glob("*-search-*"), key=lambda path: path.stat().st_mtime))
    assert isinstance(findings, SearchFindings)
    return findings


def table_row(name: str, runs: Sequence[Run], findings: SearchFindings) -> list[str]:
    """Return the row of a framework."""
    own = [run for run in runs if run.framework == name]
    fits = {run.configuration for run in own if run.peak_mib <= findings.budget_bytes / MIB}
    by_configuration = {one: [run for run in own if run.configuration == one] for one in fits}
    times = {one: min(run.step_seconds for run in some) for one, some in by_configuration.items()}
    spreads = [
        max(run.step_seconds for run in some) / min(run.step_seconds for run in some) - 1
        for some in by_configuration.values()
    ]
    best = min(times, key=lambda one: times[one])
    answer = "none" if findings.best is None else label(findings.best.choice)
    slower = f"{100 * (times[answer] / times[best] - 1):.1f} %" if answer in times else "not known"
    certificate = findings.certificate
    bound = (
        "none" if certificate is None or certificate.stated_bound is None else f"{100 * certificate.stated_bound:.0f} %"
    )
    check = findings.verification
    losses = "not compared: the answer is plain training"
    if check is not None and check.max_loss_difference is not None:
        agree = f"agree to {check.max_loss_difference:.1e} (tolerance {check.tolerance:.1e})"
        losses = agree if check.same_training else check.difference
    rounds = [sum(run.seconds for run in own if run.repeat == repeat) for repeat in sorted({run.repeat for run in own})]
    return [
        name,
        f"{len(fits)} of {len({run.configuration for run in own})}",
        answer,
        best,
        slower,
        bound,
        f"{100 * statistics.median(spreads):.0f} % (at most {100 * max(spreads):.0f} %)",
        f"{len(rounds)}",
        f"{statistics.median(rounds):.0f}",
        f"{sum(findings.seconds.values()):.0f} ({len(findings.rows)} trials)",
        losses,
    ]


HEAD = (
    "framework",
    "fit the budget",
    "answer",
    "best of the exhaustive run",
    "answer slower by",
    "bound that the search stated",
    "spread of a step time over the rounds",
    "rounds",
    "seconds of a round",
    "seconds of the search",
    "losses of the answer and of plain training",
)


def markdown(rows: Sequence[Sequence[str]], loads: Sequence[float]) -> str:
    """Return the table with its conditions."""
    about = {**environment(torch.device("cpu")), **{name: version(name) for name in ("accelerate", "lightning", "trl")}}
    facts = ("processor", "cores", "system", "python", "torch", "transformers", "accelerate", "lightning", "trl")
    conditions = ", ".join(f"{name} {about[name]}" for name in facts)
    lines = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]
    return (
        f"# Searches of commands beside exhaustive runs, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}\n\n"
        f"{conditions}; {torch.get_num_threads()} thread; load average {min(loads):.1f} to {max(loads):.1f}. "
        f"Effective batch {EFFECTIVE_BATCH_SIZE}; {NUM_STEPS} steps a run, of which {NUM_WARMUP_STEPS} are not timed. "
        "The time of a configuration is the median step of its least disturbed run.\n\n" + "\n".join(lines) + "\n"
    )


def write(
    target: Path,
    names: Sequence[str],
    runs: Sequence[Run],
    found: Mapping[str, SearchFindings],
    loads: Sequence[float],
) -> None:
    """Write both files."""
    with target.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(runs[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
    table = markdown([table_row(name, runs, found[name]) for name in names], loads)
    target.with_suffix(".md").write_text(table)
    print(table)


def main() -> None:
    """Measure, search, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of names of frameworks")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the files are written")
    given = parser.parse_args()
    names = [name for name in CASES if re.search(given.only, name)]
    target = given.folder.absolute() / f"command_search_cpu_{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}"
    found: dict[str, SearchFindings] = {}
    loads, runs = [os.getloadavg()[0]], []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_programs(Path(folder))
        for repeat in range(1, given.repeats + 1):
            runs += measure_all(names, repeat)
            for name in names if repeat == 1 else ():
                budget = statistics.median(run.peak_mib for run in runs if run.framework == name)
                found[name] = search(CASES[name], f"{budget:.1f}MiB")
                loads.append(os.getloadavg()[0])
            loads.append(os.getloadavg()[0])
            write(target, names, runs, found, loads)


if __name__ == "__main__":
    main()
