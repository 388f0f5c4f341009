"""The options among the words of a command, as argparse and its kin read them."""

import re
from collections.abc import Sequence

OTHER_OPTION = re.compile(r"-\D.*")
"""A word behind an option that is no value of it: -v, but not the number -1."""


def option_of(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option as it is written, or an empty text if it has none; None without the option."""
    place = _place_of(words, name)
    if place is None:
        return None
    _, equals, value = words[place].partition("=")
    if equals:
        return value
    following = words[place + 1 : place + 2]
    return following[0] if following and not OTHER_OPTION.fullmatch(following[0]) else ""


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
    places = [number for number, one in enumerate(names) if one.startswith("-") and _plain(one) == _plain(name)]
    return places[-1] if places else None


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
