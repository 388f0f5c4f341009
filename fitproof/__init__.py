"""Fitproof from Python: a function for each question, a callback of trainers, and what extensions implement.

The implementation is the package `pipeline`, whose names may change; those of this package do not.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_FOLDER = str(Path(__file__).parent.parent)
sys.path.insert(0, _FOLDER)  # the user's own folder may have a pipeline/ too
import pipeline  # noqa: E402

sys.path.remove(_FOLDER)
if str(Path(str(pipeline.__file__)).parent.parent) != _FOLDER:
    raise ImportError(
        f"fitproof must use the package pipeline that lies beside it in {_FOLDER}, and {pipeline.__file__} has been "
        "imported under that name already; import fitproof first"
    )

from pipeline.api import compare, export, finetune, longest, plan, profile, search, simulate  # noqa: E402

if TYPE_CHECKING:
    from pipeline.base.contracts import Corpus, Model
    from pipeline.base.errors import InvalidInputError, NothingMeasuredError
    from pipeline.base.technique import Mathematics, Stage, Step, Technique
    from pipeline.export.target import Target
    from pipeline.jobs.fit_callback import DoesNotFitError, FitCallback
    from pipeline.prediction.commands.simulation import Simulation
    from pipeline.searching.sampler import PredictiveSampler

__all__ = [
    "Corpus",
    "DoesNotFitError",
    "FitCallback",
    "InvalidInputError",
    "Mathematics",
    "Model",
    "NothingMeasuredError",
    "PredictiveSampler",
    "Simulation",
    "Stage",
    "Step",
    "Target",
    "Technique",
    "compare",
    "export",
    "finetune",
    "longest",
    "plan",
    "profile",
    "search",
    "simulate",
]

_MODULES = {
    "Corpus": "pipeline.base.contracts",
    "DoesNotFitError": "pipeline.jobs.fit_callback",
    "FitCallback": "pipeline.jobs.fit_callback",
    "InvalidInputError": "pipeline.base.errors",
    "Mathematics": "pipeline.base.technique",
    "Model": "pipeline.base.contracts",
    "NothingMeasuredError": "pipeline.base.errors",
    "PredictiveSampler": "pipeline.searching.sampler",
    "Simulation": "pipeline.prediction.commands.simulation",
    "Stage": "pipeline.base.technique",
    "Step": "pipeline.base.technique",
    "Target": "pipeline.export.target",
    "Technique": "pipeline.base.technique",
}
"""The module of each name that is imported when it is first used: some of them import torch."""


def __getattr__(name: str) -> Any:
    """Return a name that is imported when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fitproof' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
