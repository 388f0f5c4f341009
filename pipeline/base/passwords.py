"""Passwords in connection strings: found, so that they are refused, and removed from what others may read."""

import re

_IN_ADDRESS = re.compile(r"(://[^:/?#@\s]*):\S+@")
"""user:password@ of a URL; the password may hold any character, for not every driver wants it encoded."""
_IN_OPTIONS = re.compile(r"\b((?:ssl)?passw(?:or)?d=)[^&\s]+", re.IGNORECASE)
"""An option such as ?password=..., which PostgreSQL's drivers take too."""


def has_password(text: str) -> bool:
    """Return whether a text contains a URL with a password."""
    return without_passwords(text) != text


def without_passwords(text: str) -> str:
    """Return a text without the passwords of the URLs in it."""
    return _IN_OPTIONS.sub(r"\1***", _IN_ADDRESS.sub(r"\1@", text))
