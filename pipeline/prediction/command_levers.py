"""The levers of a training command: options, marked values and variables that change the memory that it needs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.command_options import option_of, with_option
from pipeline.config.command_template import ALLOCATOR, Template
from pipeline.config.space import Value

EXPANDABLE = "expandable_segments:True"
TAKES_ALL_ARGUMENTS = re.compile(r"HfArgumentParser|TrlParser")
"""A script that mentions one of these takes every option of transformers' TrainingArguments."""
DEFAULT_BATCH_SIZE = 8
"""Of transformers' TrainingArguments."""
BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
RECOMPUTED = "the forward pass of each layer is computed twice: about a third more work"
UNKNOWN_PRICE = "not known"
FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the first cards with instructions for it."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One lever of a command at another value."""

    lever: str
    shown: str
    """As it is written in a shell."""
    price: str
    """What it is expected to cost in time, and what else it changes."""
    options: Mapping[str, str | None] = field(default_factory=dict)
    """Options of the command and their values; None for an option without one."""
    marked: Mapping[str, Value] = field(default_factory=dict)
    """Values of placeholders."""
    variables: Mapping[str, str] = field(default_factory=dict)


def marks_of(template: Template) -> dict[str, tuple[Value, ...]]:
    """Return the values of each placeholder that has several; the command has the first of each.

    Those with a colon are a mapping of YAML, which stays as it is written.
    """
    values = {name: one.values for name, one in template.placeholders.items() if len(one.values) > 1}
    return {name: own for name, own in values.items() if not any(":" in str(value) for value in own)}


def command_with(template: Template, changes: Sequence[Change] = ()) -> tuple[str, ...]:
    """Return the command with these changes; what is written like a placeholder without values stays."""
    chosen = {name: values[0] for name, values in marks_of(template).items()}
    for change in changes:
        chosen.update(change.marked)
    words = template.fill(chosen).words
    for change in changes:
        for name, value in change.options.items():
            words = with_option(words, name, value)
    return words


def levers_of(
    template: Template, own: Mapping[str, Sequence[str]], python: Path, capability: tuple[int, int]
) -> tuple[tuple[Change, ...], ...]:
    """Return the levers of a command, each with its changes, the smallest first.

    Levers that keep the training come first, in the order of what they cost in time; then those that round differently,
    then those that train differently. `own` has options of the command with the values to try.
    """
    words = command_with(template)
    script = _script_of(words)
    takes_all = TAKES_ALL_ARGUMENTS.search(script) is not None
    found = [
        _expandable(),
        _switch(words, script, takes_all, "use_liger_kernel", "none: several operators become one kernel")
        if _has_package(python, "liger_kernel")
        else (),
        _attention(words),
        *(_marked(name, values) for name, values in marks_of(template).items()),
        *(_option(name, values) for name, values in own.items()),
        _accumulation(words, script, takes_all),
        _switch(words, script, takes_all, "gradient_checkpointing", RECOMPUTED),
        _precision(words, script, takes_all, capability),
        _optimizer(words, takes_all, python),
    ]
    return tuple(changes for changes in found if changes)


def _script_of(words: Sequence[str]) -> str:
    """Return the source of the script that a command runs; a program such as trl is its own name of a parser."""
    for word in words:
        path = Path(shutil.which(word) or word) if word == words[0] else Path(word)
        if path.suffix == ".py" and path.is_file():
            return path.read_text(errors="replace")
        if path.name == "trl":
            return "TrlParser"
    return ""


def _has_package(python: Path, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([str(python), "-c", code], capture_output=True, check=False).returncode == 0


def _is_known(script: str, takes_all: bool, name: str) -> bool:
    return takes_all or re.search(rf"[\"']--{name.replace('_', '[_-]')}[\"']", script) is not None


def _expandable() -> tuple[Change, ...]:
    before = os.environ.get(ALLOCATOR, "")
    if "expandable_segments" in before or "expandable_segments" in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        return ()
    value = ",".join(filter(None, [before, EXPANDABLE]))
    shown = f"{ALLOCATOR}={value}"
    return (Change(lever=ALLOCATOR, shown=shown, price="none: no work is added", variables={ALLOCATOR: value}),)


def _marked(name: str, values: Sequence[Value]) -> tuple[Change, ...]:
    return tuple(
        Change(lever=name, shown=f"{name}={value}", price=UNKNOWN_PRICE, marked={name: value}) for value in values[1:]
    )


def _option(name: str, values: Sequence[str]) -> tuple[Change, ...]:
    plain = name.lstrip("-")
    return tuple(
        Change(lever=plain, shown=f"--{plain} {value}", price=UNKNOWN_PRICE, options={plain: value}) for value in values
    )


def _switch(words: Sequence[str], script: str, takes_all: bool, name: str, price: str) -> tuple[Change, ...]:
    """Return the change that turns on an option which is off."""
    now = option_of(words, name)
    if now == "" or (now or "").lower() in ("true", "1", "yes"):
        return ()
    if now is None and not _is_known(script, takes_all, name):
        return ()
    value = None if not takes_all and _is_bare(script, name) else "True"
    shown = f"--{name}" if value is None else f"--{name} {value}"
    return (Change(lever=name, shown=shown, price=price, options={name: value}),)


def _is_bare(script: str, name: str) -> bool:
    """Whether argparse takes the option without a value."""
    found = re.search(rf"[\"']--{name.replace('_', '[_-]')}[\"'](.{{0,200}})", script, re.DOTALL)
    return found is not None and "store_true" in found[1].partition("add_argument")[0]


def _attention(words: Sequence[str]) -> tuple[Change, ...]:
    name = "attn_implementation"
    if option_of(words, name) != "eager":
        return ()
    price = "less: the scores of all pairs of tokens are not written to memory; other rounding"
    return (Change(lever=name, shown=f"--{name} sdpa", price=price, options={name: "sdpa"}),)


def _accumulation(words: Sequence[str], script: str, takes_all: bool) -> tuple[Change, ...]:
    """Return changes to smaller batches at the same number of sequences for each update."""
    known = all(
        option_of(words, name) is not None or _is_known(script, takes_all, name) for name in (BATCH, ACCUMULATION)
    )
    batch = option_of(words, BATCH) or (str(DEFAULT_BATCH_SIZE) if takes_all else "")
    steps = option_of(words, ACCUMULATION) or "1"
    if not known or not batch.isdecimal() or not steps.isdecimal():
        return ()
    return tuple(_accumulated(int(batch), int(steps), parts) for parts in _powers_that_divide(int(batch)))


def _accumulated(batch: int, steps: int, parts: int) -> Change:
    options = {BATCH: str(batch // parts), ACCUMULATION: str(steps * parts)}
    return Change(
        lever=BATCH,
        shown=" ".join(f"--{name} {value}" for name, value in options.items()),
        price=f"the same work in {parts} times as many passes of 1/{parts} the size, which use the card less well",
        options=options,
    )


def _powers_that_divide(number: int) -> Iterator[int]:
    parts = 2
    while number > 0 and number % parts == 0:
        yield parts
        parts *= 2


def _precision(words: Sequence[str], script: str, takes_all: bool, capability: tuple[int, int]) -> tuple[Change, ...]:
    """Return the change to 16 bits, of the format for which the card has instructions."""
    if any(option_of(words, name) not in (None, "False", "false") for name in ("bf16", "fp16")):
        return ()
    name = "bf16" if capability >= FIRST_WITH_BFLOAT16 else "fp16"
    return _switch(words, script, takes_all, name, "less: products of matrices in 16 bits; other rounding")


def _optimizer(words: Sequence[str], takes_all: bool, python: Path) -> tuple[Change, ...]:
    now = option_of(words, "optim") or "adamw_torch"
    if not now.startswith("adamw_torch") or (option_of(words, "optim") is None and not takes_all):
        return ()
    value = "adamw_bnb_8bit" if _has_package(python, "bitsandbytes") else "adafactor"
    price = f"about none; another optimizer: another training than {now}"
    return (Change(lever="optim", shown=f"--optim {value}", price=price, options={"optim": value}),)
