"""Runs when a Python process starts that is watched, as on a simulated card: Python imports a module of this name.

The user's own module of this name is run as if this one were not there. The files that SIMULATED_CARD_HOOKS names are
run as soon as torch has been imported.
"""

import importlib.abc
import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _run_users_own() -> None:
    here = os.path.dirname(__file__)  # noqa: PTH120 (a start imports no more than it must)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Runs the files of SIMULATED_CARD_HOOKS once torch has been imported.

    Libraries that ask whether torch is there look for it as well, and do not import it.
    """

    _is_looking = False

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_follow(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                for file in filter(None, os.environ.get("SIMULATED_CARD_HOOKS", "").split(os.pathsep)):
                    runpy.run_path(file, run_name="simulated_card_hook")

            spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec


if "SIMULATED_CARD_RANK" in os.environ:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        os._exit(0)  # a launcher starts a process for each card of a machine: the first is the one rank that runs
    runpy.run_path(os.path.join(os.path.dirname(__file__), "ranks.py"))["set_rank"]()  # noqa: PTH118, PTH120
if "SIMULATED_CARD_HOOKS" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_run_users_own()
