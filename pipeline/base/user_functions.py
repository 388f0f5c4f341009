"""Functions in the user's own code, named as path.to.module:function: found, called, and their errors told."""

import hashlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.base.errors import InvalidInputError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""path.to.module:function"""
NUM_FRAMES = 3
"""Calls that are left of a traceback."""


def names_function(name: str) -> bool:
    """Whether `name` has the form path.to.module:function."""
    return NAME.fullmatch(name) is not None


def call(name: str, *arguments: Any) -> Any:
    """Return what a function of the user's returns.

    Raises:
        InvalidInputError: it cannot be found, or it raises; the message ends with its traceback, shortened.

    """
    function = find(name)
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's code raises
        raise raised(name, error) from error


def find(name: str) -> Callable[..., Any]:
    """Return the function `name`; modules are also looked for in the current folder.

    Raises:
        InvalidInputError: the module cannot be imported, or has no such function.

    """
    module_name, _, attribute = name.partition(":")
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise raised(name, error) from error
        raise InvalidInputError(
            f"{name} must name a function that can be imported from {Path.cwd()}, and there is no module {error.name}; "
            "write path.to.module:function, or start in another folder"
        ) from error
    except Exception as error:  # whatever the user's module raises
        raise raised(name, error) from error
    function = getattr(module, attribute, None)
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        own = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise InvalidInputError(
            f"{name} must name a function, and {module_name} has none called {attribute}; "
            f"its functions are: {', '.join(own) or 'none'}"
        )
    found: Callable[..., Any] = function
    return found


def digest(name: str) -> str:
    """Return what changes whenever the file that defines a function does."""
    module = sys.modules[find(name).__module__]
    return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:16]


def raised(name: str, error: Exception) -> InvalidInputError:
    """Return the error of a function that raises: a line, and the traceback without this project and its packages."""
    return InvalidInputError(f"{name} must work, and raises {type(error).__name__}; mend it\n{_shortened(error)}")


def _shortened(error: Exception) -> str:
    """Return the last calls in the user's own code, and what was raised."""
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    apart = (str(Path(__file__).parent.parent), "<frozen", *libraries)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(apart)]
    lines = [*traceback.format_list(frames[-NUM_FRAMES:]), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()
