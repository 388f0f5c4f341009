"""The names and questions of the entry points, available without importing their code."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

OWN_FOLDER = Path("experiments")
"""The user's own YAML files, below the current folder; they come before Fitproof's of the same name."""
_PACKAGE = Path(__file__).parent.parent
FOLDER = next(
    folder for folder in (_PACKAGE / OWN_FOLDER, _PACKAGE.parent / OWN_FOLDER) if folder.is_dir()
)  # an installed package contains the folder, a checkout has it next to the package
"""Fitproof's own YAML files."""

SINGLE: Mapping[str, str] = {
    "main": "What does one configuration cost?",
    "profiling": "Where are the memory and the time of one configuration?",
}
"""Entry points that run the one configuration of the file `config`, with their questions."""
SPACES: Mapping[str, str] = {
    "plan": "How much memory and time would each configuration need, on this device or on any GPU?",
    "search": "What is the fastest configuration that fits a memory budget?",
    "finetune": "Which kinds of fine-tuning fit a memory budget, and what is the fastest configuration of one?",
}
"""Entry points whose YAML has a space of configurations, with their questions."""
TOOLS: Mapping[str, str] = {
    "check": "Does a training need more memory than it may? Compares a simulated card's with a limit or baseline.",
    "compare": "How do runs that MLflow already has compare?",
    "explain": "What does an out-of-memory message say, and what is the smallest change that fits?",
    "export": "Which files train a configuration in other frameworks?",
    "report": "What did a finished job find? Writes its page again.",
    "simulate": "What does any training need of a card? Runs a command on a simulated one, without a GPU.",
    "sync": "Which results are not in the tracking store yet? Sends them.",
    "worker": "What is left to measure of a search on another machine? Measures it here.",
}
"""Commands with settings of their own, which take none of a run, with their questions."""
BEST_FILE = Path("best.yaml")
"""The fastest configuration that a search found, which `export` reads if no other file is given."""
EXISTING: Mapping[str, str] = {
    "config": "file",
    "folder": "folder",
    "resume": "folder",
    "chat.path": "file or folder",
    "text_files.path": "file or folder",
}
"""Settings that name what must exist, and what that is: checked before torch is imported, which takes seconds."""
USED: Mapping[str, tuple[str, ...]] = {
    "main": (
        *("config", "model", "corpus", "sequence_length", "micro_batch_size", "effective_batch_size", "precision"),
        *("checkpointing", "num_steps", "budget", "save_every", "resume"),
    ),
    "search": (
        *("config", "model", "corpus", "sequence_length", "effective_batch_size", "budget", "space", "mathematics"),
        *("num_trials", "search_time_limit"),
    ),
    "plan": (
        *("gpu", "config", "model", "sequence_length", "effective_batch_size", "effective_batch_sizes", "budget"),
        *("other_processes", "space", "mathematics"),
    ),
    "finetune": (
        *("config", "model", "chat.path", "sequence_length", "effective_batch_size", "budget", "kind", "num_epochs"),
        *("learning_rate", "learning_rate_schedule"),
    ),
}
"""The settings that most people set, which `--help` shows, by entry point; `profiling` is as `main`."""
USED_OF_COMPARISONS = (
    *("model", "corpus", "sequence_length", "effective_batch_size", "num_steps", "repeats", "seed", "device", "budget"),
    "output",
)
"""The same of all other entry points that train."""
EXAMPLES: Mapping[str, str] = {
    "main": "fitproof main --model gpt2 --effective_batch_size 16 --precision bf16 --budget 8GiB",
    "profiling": "fitproof profiling --model gpt2 --micro_batch_size 4 --precision bf16",
    "search": "fitproof search --model gpt2 --effective_batch_size 32 --budget 8GiB",
    "plan": 'fitproof plan --model gpt2 --gpu "RTX 4090,t4" --effective_batch_size 32',
    "finetune": "fitproof finetune --model owner/name --chat.path chat.jsonl --sequence_length 1024 --budget 16GiB",
    "simulate": "fitproof simulate --gpu rtx4090 -- python train.py",
}
"""A command of each entry point; those that have none here take the same settings as their neighbours."""


def entry_points() -> list[str]:
    """Return the names of all entry points: SINGLE, and each YAML file of either folder."""
    files = [file.stem for folder in (OWN_FOLDER, FOLDER) for file in folder.glob("*.yaml")]
    return [*SINGLE, *sorted(set(files) - {*SINGLE, *TOOLS})]


def value_of(setting: str, words: Sequence[str]) -> str | None:
    """Return the last value of a setting among words that are not parsed yet: empty without one, None if not given."""
    found = None
    for word, after in pairwise((*words, "")):
        name, _, value = word.partition("=")
        if name == f"--{setting}":
            found = value or ("" if after.startswith("--") else after)
    return found


def find_file(path: Path) -> Path:
    """Return the path; experiments/... is Fitproof's own file if the user has none of that name."""
    if not path.exists() and path.parts[:1] == OWN_FOLDER.parts:
        own = FOLDER.joinpath(*path.parts[1:])
        return own if own.exists() else path
    return path


def yaml_file(entry: str) -> Path:
    """Return the YAML file of an entry point."""
    return find_file(OWN_FOLDER / f"{entry}.yaml")


def questions() -> dict[str, str]:
    """Return the question that each entry point answers, by its name."""
    from yaml import YAMLError, safe_load

    found = {}
    for name in entry_points():
        found[name] = SINGLE.get(name) or SPACES.get(name, "")
        if not found[name]:
            try:
                values = safe_load(yaml_file(name).read_text())
                found[name] = str(values["question"])
            except (OSError, UnicodeDecodeError, YAMLError, KeyError, TypeError):
                found[name] = f"{yaml_file(name)} has no question"  # running it reports the error
    return found
