"""The user's own functions and modules: imported by name, called, and their errors shortened."""

import hashlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, TypeVarTuple

from pipeline.base.errors import InvalidInputError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""path.to.module:function"""
Family = TypeVar("Family")
Others = TypeVarTuple("Others")
Found = TypeVar("Found")
NUM_FRAMES = 3
"""Frames that are kept of a traceback."""


def classes_in(module: ModuleType, family: type[Family]) -> list[type[Family]]:
    """Return the classes of a family that a module defines."""
    members = (member for _, member in inspect.getmembers(module, inspect.isclass))
    return [member for member in members if issubclass(member, family) and member.__module__ == module.__name__]


def is_function_name(name: str) -> bool:
    """Whether `name` has the form path.to.module:function."""
    return NAME.fullmatch(name) is not None


def check_names_no_file(name: str) -> None:
    """Raise InvalidInputError if a name has a module's file in place of the module."""
    file, separator, function = name.rpartition(".py:")
    if separator:
        path = Path(file)
        raise InvalidInputError(
            f"a function is named by its module, and {name} names a file; write {path.name}:{function}, and run it in "
            f"the folder {path.parent} or with PYTHONPATH={path.parent}"
        )


def call(name: str, *arguments: Any) -> Any:
    """Return the result of the user's function `name`.

    Raises:
        InvalidInputError: it cannot be found, or it raises; the message ends with its shortened traceback.

    """
    function = find(name)
    try:
        return function(*arguments)
    except InvalidInputError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(name, error) from error


def find(name: str) -> Callable[..., Any]:
    """Return the function `name`.

    Raises:
        InvalidInputError: the module cannot be imported, or has no such function.

    """
    module_name, _, attribute = name.partition(":")
    module = import_user_module(module_name, name, "a function", "path.to.module:function")
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


def import_user_module(module_name: str, name: str, kind: str, form: str) -> ModuleType:
    """Return the module, which may be in the current folder; `name`, `kind` and `form` are for the error's message.

    Raises:
        InvalidInputError: it cannot be imported.

    """
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise user_code_error(name, error) from error
        raise InvalidInputError(
            f"{name} must name {kind} that can be imported from {Path.cwd()}, and there is no module {error.name}; "
            f"write {form}, or start in another folder"
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(name, error) from error


def digest(name: str) -> str:
    """Return a digest of the file that defines the function `name`."""
    return module_digest(find(name).__module__)


def version_of(name: str) -> str:
    """Return a text that changes with the code of a user's function, or with the configuration in a model's folder."""
    if is_function_name(name):
        return digest(name)
    file = Path(name) / "config.json"
    return f"{(state := file.stat()).st_mtime_ns} {state.st_size}" if file.is_file() else ""


def once_of_each(function: Callable[[Family, str, *Others], Found]) -> Callable[[Family, str, *Others], Found]:
    """Cache function(family, name, ...) by its arguments and by the version of what `name` is."""

    @lru_cache
    def called(_version: str, family: Family, name: str, others: tuple[*Others]) -> Found:
        return function(family, name, *others)

    @wraps(function)
    def remembered(family: Family, name: str, *others: *Others) -> Found:
        return called(version_of(name), family, name, others)

    return remembered


def module_digest(module_name: str) -> str:
    """Return a digest of the file of an imported module."""
    return hashlib.sha256(Path(str(sys.modules[module_name].__file__)).read_bytes()).hexdigest()[:16]


def user_code_error(name: str, error: Exception) -> InvalidInputError:
    """Return the error for user code that raises: one line, and the last frames of the user's own code."""
    message = f"{name} must not raise an error, and raises {type(error).__name__}; fix it"
    return InvalidInputError(f"{message}\n{_shortened(error)}")


def _shortened(error: Exception) -> str:
    """Return the last frames of a traceback in the user's own code, and the exception."""
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    others = (f"{Path(__file__).parent.parent}{os.sep}", "<frozen", *libraries)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    lines = [*traceback.format_list(frames[-NUM_FRAMES:]), *traceback.format_exception_only(error)]
    return "".join(lines).rstrip()
