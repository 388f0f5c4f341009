"""What measurements depend on besides the settings: hardware, versions and the allocator's configuration."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pynvml
import torch

from pipeline.base.errors import differing
from pipeline.memory.allocator_options import options_in
from pipeline.memory.device import device_name, total_bytes

PROJECT = Path(__file__).parents[2]
"""The checkout, or the folder in which the package is installed."""
PACKAGES = ("torch", "transformers", "tokenizers", "optuna")
"""Packages of which all workers of a study need the same version."""


@lru_cache
def environment(device: torch.device) -> dict[str, str]:
    """Return the versions and hardware, by name; what is not available is left out."""
    facts = {
        "device_name": device_name(device),
        "device_memory_mib": f"{total_bytes(device) / 2**20:.0f}",
        "processor": device_name(torch.device("cpu")),
        "cores": str(os.cpu_count()),
        "host_memory_mib": f"{total_bytes(torch.device('cpu')) / 2**20:.0f}",
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in (*PACKAGES, "mlflow")},
        "cuda": torch.version.cuda,
        "driver": _driver() if device.type == "cuda" else None,
        "allocator": options_in(),
        "fitproof": version_of("fitproof"),
    }
    if (PROJECT / ".git").exists() and (commit := _git("rev-parse", "HEAD")):
        facts["git_commit"] = commit
        facts["git_changes"] = "yes" if _git("status", "--porcelain", "--untracked-files=no") else "no"
    return {name: value for name, value in facts.items() if value}


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
    names = differing(own, there)
    if not names:
        return None
    changes = "; ".join(f"{name} is {own.get(name)}, and is {there.get(name)} there" for name in names)
    return f"a worker needs the versions of the search that it joins: {changes}; install the same on both machines"


def version_of(package: str) -> str | None:
    """Return the version of an installed package; those of MLflow and Optuna are not needed to train or to predict."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of the GPU's driver; None without NVML."""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _git(*words: str) -> str | None:
    """Return the output of a git command in this project; None without git or outside of a checkout."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(PROJECT), *words], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
