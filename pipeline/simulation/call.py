"""A call of a function as a command: a simulated card needs a process of its own, with torch's CUDA build."""

import pickle
import sys
import sysconfig
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.simulation.process import call

CONTENT = "call.pickle"
REMEDY = "write it into a file, at the top level of a module or of the script"


def command_of(function: Callable[..., object], arguments: tuple[Any, ...], folder: Path) -> tuple[str, ...]:
    """Return the command that calls a function with these arguments; what they are is written into `folder`.

    The function is imported by its module and name, as multiprocessing does.

    Raises:
        InvalidInputError: the function cannot be imported so, or an argument cannot be pickled.

    """
    name = name_of(function)
    if "<" in name:
        raise InvalidInputError(f"simulate calls a function by its module and name, and {name} has none; {REMEDY}")
    own = sys.modules["__main__"]
    if getattr(function, "__module__", None) == "__main__" and not getattr(own, "__file__", None):
        raise InvalidInputError(
            f"simulate calls a function by its module and name, and {name} is of a session without a file; {REMEDY}"
        )
    preparation = spawn.get_preparation_data("simulated")
    content = {
        **{key: preparation[key] for key in preparation.keys() - {"authkey", "start_method"}},
        "sys_path": [path for path in preparation["sys_path"] if not _is_environments(path)],
    }
    try:
        written = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidInputError(
            f"what simulate is given must be importable or be pickled, and {name} or an argument is not ({error}); "
            f"{REMEDY}"
        ) from error
    (folder / CONTENT).write_bytes(pickle.dumps((content, written)))
    return (sys.executable, str(Path(call.__file__)), str(folder / CONTENT))


def name_of(function: Callable[..., object]) -> str:
    """Return the module and name of a function, or its description if it has none."""
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else repr(function)


def _is_environments(path: str) -> bool:
    """Whether a folder is of this Python and its packages; the command's own has others."""
    return path.startswith(sysconfig.get_path("stdlib")) or Path(path).name in ("site-packages", "dist-packages")
