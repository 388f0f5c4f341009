"""The levers of a training command: options, marked values and variables that change the memory that it needs."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.base.errors import InvalidInputError

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
MARKED = re.compile(r"\{(\w+):([^{}:,]+(?:,[^{}:,]+)+)\}")
"""A part of a command with the values that it may have, the first of which it has now: {batch:8,4,2}."""
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
    marked: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A command with marked values."""

    words: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """The values of each mark; the command has the first of each."""

    def command(self, changes: Sequence[Change] = ()) -> tuple[str, ...]:
        """Return the command with these changes."""
        chosen = {name: values[0] for name, values in self.values.items()}
        for change in changes:
            chosen.update(change.marked)
        words = tuple(MARKED.sub(lambda found: chosen[found[1]], word) for word in self.words)
        for change in changes:
            for name, value in change.options.items():
                words = with_option(words, name, value)
        return words


def template_of(words: Sequence[str]) -> Template:
    """Return the command with its marks.

    Raises:
        InvalidInputError: two marks of one name have other values.

    """
    values: dict[str, tuple[str, ...]] = {}
    for found in (found for word in words for found in MARKED.finditer(word)):
        own = tuple(part.strip() for part in found[2].split(","))
        if values.setdefault(found[1], own) != own:
            raise InvalidInputError(
                f"a marked value has the same values wherever it stands, and {found[1]} has {','.join(own)} after "
                f"{','.join(values[found[1]])}; give one of them another name"
            )
    return Template(words=tuple(words), values=values)


def levers_of(
    template: Template, own: Mapping[str, Sequence[str]], python: Path, capability: tuple[int, int]
) -> tuple[tuple[Change, ...], ...]:
    """Return the levers of a command, each with its changes, the smallest first.

    Levers that keep the training come first, in the order of what they cost in time; then those that round differently,
    then those that train differently. `own` has options of the command with the values to try.
    """
    words = template.command()
    script = _script_of(words)
    takes_all = TAKES_ALL_ARGUMENTS.search(script) is not None
    found = [
        _expandable(),
        _switch(words, script, takes_all, "use_liger_kernel", "none: several operators become one kernel")
        if _has_package(python, "liger_kernel")
        else (),
        _attention(words),
        *(_marked(name, values) for name, values in template.values.items()),
        *(_option(name, values) for name, values in own.items()),
        _accumulation(words, script, takes_all),
        _switch(words, script, takes_all, "gradient_checkpointing", RECOMPUTED),
        _precision(words, script, takes_all, capability),
        _optimizer(words, takes_all, python),
    ]
    return tuple(changes for changes in found if changes)


def option_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option as it is written, or an empty text if it has none; None without the option."""
    place = _place_of(words, name)
    if place is None:
        return None
    _, equals, value = words[place].partition("=")
    if equals:
        return value
    following = words[place + 1 : place + 2]
    return following[0] if following and not following[0].startswith("--") else ""


def with_option(words: Sequence[str], name: str, value: str | None) -> tuple[str, ...]:
    """Return the words with an option at another value, or with the option added at the end."""
    place = _place_of(words, name)
    if place is None:
        return (*words, f"--{name}", *([] if value is None else [value]))
    old, equals, _ = words[place].partition("=")
    if equals:
        return (*words[:place], f"{old}={value}", *words[place + 1 :])
    num_old = 1 if option_of(words, name) == "" else 2
    return (*words[:place], old, *([] if value is None else [value]), *words[place + num_old :])


def _place_of(words: Sequence[str], name: str) -> int | None:
    """Return where an option stands; the last counts, and - is as good as _."""
    names = [word.partition("=")[0] for word in words]
    wanted = name.lstrip("-").replace("-", "_")
    places = [number for number, one in enumerate(names) if one.startswith("-") and _plain(one) == wanted]
    return places[-1] if places else None


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


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


def _marked(name: str, values: Sequence[str]) -> tuple[Change, ...]:
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
