"""How long the reader of corpora takes, and how much memory of the host: 200,000 conversations, 100 million tokens.

    python benchmarks/reader.py                        appends missing rows to benchmarks/reader_<date>.csv, writes .md
    python benchmarks/reader.py --checkout FOLDER      measures another version of Fitproof

The text is that of Python's own reference. Each case is a process of its own that reads the corpus once, from an empty
cache, for a model whose tokenizer is trained on it. Memory is what the kernel counts: the largest resident set of the
process, and of its largest child for each core, if it has children.
"""

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from exit_code import exit_code_of, files_parser
from rows import add_missing

from pipeline.base.processes import num_cores

CASES = {
    "200,000 conversations": ("chat", 200_000),
    "73 million tokens of text": ("text_files", 150_000),
    "100 million tokens of text": ("text_files", 205_000),
}
"""For each case: its corpus and the number of rows."""
CODE = """
import json, os, resource, sys, time
from pipeline.config.experiment import make_experiment
values = json.loads(sys.argv[1])
start = time.monotonic()
train = make_experiment(values, "main").read_corpus().train
seconds = time.monotonic() - start
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
used = sum(each.ru_utime + each.ru_stime for each in (own, children))
store = train.store if hasattr(train, "store") else train._store
print(json.dumps([len(store.tokens), seconds, used, own.ru_maxrss, children.ru_maxrss]))
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What reading one corpus took."""

    name: str
    """The case, and the version of Fitproof."""
    num_rows: int
    num_tokens: int
    """Of the documents to train on, nine of ten."""
    seconds: float
    cpu_seconds: float
    """Of all processes."""
    peak_mib: int
    """Of all processes together, at most."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure all cases that the table lacks; return the exit code: 0, 2 invalid input, 130 interrupted."""
    parser = files_parser(__doc__)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent, help="the version to measure")
    parser.add_argument("--version", default="this", help="its name in the table")
    parser.add_argument("--cases", nargs="*", default=[*CASES], help="names of cases")
    given = parser.parse_args(words)
    return exit_code_of(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    table = given.folder / f"reader_{given.date}.csv"
    names = {f"{case}, {given.version}": case for case in given.cases}
    add_missing(table, Measured, names, lambda name: measure(name, *CASES[names[name]], given.checkout))
    with table.open(newline="") as file:
        table.with_suffix(".md").write_text(page(list(csv.DictReader(file)), given.date))
    return 0


def measure(name: str, corpus: str, num_rows: int, checkout: Path) -> Measured:
    """Return what reading a corpus of so many rows takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(corpus, num_rows))
        values = {
            "model": "gpt2-nano",
            "vocabulary_size": 8192,
            "sequence_length": 256,
            "device": "cpu",
            "corpus": corpus,
            corpus: {"path": str(path)},
            **({"sequences": "padded"} if corpus == "chat" else {}),
        }
        environment = {**os.environ, "PYTHONPATH": str(checkout.absolute()), "FITPROOF_CACHE": f"{folder}/cache"}
        command = [sys.executable, "-P", "-c", CODE, json.dumps(values)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    num_tokens, seconds, used, own_kib, child_kib = json.loads(done.stdout)
    peak_mib = round((own_kib + num_cores() * child_kib) / 1024)
    return Measured(
        name=name,
        num_rows=num_rows,
        num_tokens=num_tokens,
        seconds=round(seconds, 1),
        cpu_seconds=round(used, 1),
        peak_mib=peak_mib,
    )


def rows(corpus: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield conversations of one or two answers, or texts, of words of the reference that follow one another."""
    chance = random.Random(0)  # noqa: S311  the same rows each time
    words = " ".join(topics[name] for name in sorted(topics)).split()

    def some(least: int, most: int) -> str:
        number = chance.randint(least, most)
        start = chance.randrange(len(words) - number)
        return " ".join(words[start : start + number])

    for number in range(count):
        if corpus != "chat":
            yield {"text": some(100, 600)}
            continue
        turns = []
        for _ in range(chance.choice((1, 1, 1, 2))):
            turns += [{"role": "user", "content": some(5, 40)}, {"role": "assistant", "content": some(10, 120)}]
        yield {"id": number, "messages": turns}


def page(table: Sequence[dict[str, str]], date: str) -> str:
    """Return the table as Markdown."""
    heading = (
        f"# The reader of corpora, {date}\n\n"
        "Rows of JSON Lines, read, tokenized and cached for `gpt2-nano`, whose tokenizer (8,192 tokens) is trained on\n"
        f"them ([reader.py](reader.py)), on {num_cores()} cores that others used as well: seconds vary by a\n"
        "multiple, CPU seconds and memory do not. Tokens are those of the nine documents of ten that are trained on,\n"
        "and memory is that of all processes together, at most. c2c3145 kept a corpus as lists of integers; its CPU\n"
        "seconds are without the imports, and its text is other rows of the same kind.\n\n"
        "| case, version | rows | tokens | seconds | CPU seconds | peak MiB |\n|---|---:|---:|---:|---:|---:|\n"
    )
    lines = [
        f"| {row['name']} | {int(row['num_rows']):,} | {int(row['num_tokens']):,} | {float(row['seconds']):,.0f} | "
        f"{float(row['cpu_seconds']):,.0f} | {int(row['peak_mib']):,} |"
        for row in table
    ]
    return heading + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
