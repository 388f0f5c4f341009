"""A call of a function as a command: a simulated card needs a process of its own, with torch's CUDA build."""

import pickle
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import cloudpickle

from pipeline.base.errors import InvalidInputError
from pipeline.simulation.process import call

CONTENT = "call.pickle"
NOT_PICKLED = (pickle.PicklingError, AttributeError, TypeError)
"""Errors of pickle and cloudpickle for what they cannot send."""


def command_of(function: Callable[..., object], arguments: tuple[Any, ...], folder: Path) -> tuple[str, ...]:
    """Return the command that calls a function with these arguments; what they are is written into `folder`.

    The function is imported by its module and name, as multiprocessing does. One that cannot be, such as a lambda or a
    function defined in a notebook, is sent with its code and with all that it uses of the notebook or script.

    Raises:
        InvalidInputError: neither is possible, or an argument cannot be pickled.

    """
    preparation = spawn.get_preparation_data("simulated")
    content = {
        **{key: preparation[key] for key in preparation.keys() - {"authkey", "start_method"}},
        "sys_path": [path for path in preparation["sys_path"] if not _is_environments(path)],
    }
    (folder / CONTENT).write_bytes(pickle.dumps((content, _pickled(function, arguments))))
    return (sys.executable, str(Path(call.__file__)), str(folder / CONTENT))


def _pickled(function: Callable[..., object], arguments: tuple[Any, ...]) -> bytes:
    """Return the call by the names of what it is made of or, where these do not suffice, with their code."""
    if getattr(sys.modules["__main__"], "__file__", None):  # else the other process has no functions of __main__
        with suppress(*NOT_PICKLED):
            return pickle.dumps((function, arguments))
    try:
        code: bytes = cloudpickle.dumps((function, arguments))
    except NOT_PICKLED as error:
        raise InvalidInputError(
            f"what simulate is given must be importable or be pickled, and {name_of(function)} or an argument is not "
            f"({error}); write it into a file, at the top level of a module or of the script"
        ) from error
    return code


def name_of(function: Callable[..., object]) -> str:
    """Return the module and name of a function, or its description if it has none."""
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


def _is_environments(path: str) -> bool:
    """Whether a folder is of this Python and its packages; the command's own has others."""
    return path.startswith(sysconfig.get_path("stdlib")) or Path(path).name in ("site-packages", "dist-packages")
