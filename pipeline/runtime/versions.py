"""The versions on which measurements depend: all workers of a study need the same."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "transformers", "tokenizers", "optuna")
"""Packages of which all workers of a study need the same version."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages, and a digest of Fitproof's code."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(file.read_bytes())
    code = {"code of fitproof": digest.hexdigest()[:12], "python": platform.python_version()}
    return {**code, **{name: version(name) for name in PACKAGES}}


def why_other_versions(there: Mapping[str, str]) -> str | None:
    """Return why a worker of this machine cannot join a search with these versions; None if it can."""
    own = versions()
    differing = sorted(name for name in {*own, *there} if own.get(name) != there.get(name))
    if not differing:
        return None
    changes = "; ".join(f"{name} is {own.get(name)}, and is {there.get(name)} there" for name in differing)
    return f"a worker needs the versions of the search that it joins: {changes}; install the same on both machines"
