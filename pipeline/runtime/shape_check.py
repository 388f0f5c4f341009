"""Checks that models can be built in their shapes, before anything runs."""

from collections.abc import Iterable

from pipeline.base.contracts import Model
from pipeline.base.user_functions import is_function_name
from pipeline.config.experiment import Experiment
from pipeline.runtime.worker_pool import run_all, worker_pool


def check_shapes(experiments: Iterable[Experiment]) -> None:
    """Build each distinct model, without its weights, in a worker process that has imported transformers already.

    Raises:
        InvalidInputError: a model cannot be built in its shape.

    """
    distinct = dict.fromkeys((one.model, one.settings.model) for one in experiments)
    if models := [each for each in distinct if _may_fail(*each)]:
        with worker_pool(1) as pool:
            list(run_all(pool, _build, models))


def _may_fail(model: Model, name: str) -> bool:
    """Whether a model has neither the shape that its name stands for nor one that is its own."""
    is_default_shape = name in model.names and model == type(model)()
    return not is_default_shape and not getattr(model, "pretrained", False) and not is_function_name(name)


def _build(given: tuple[Model, str]) -> None:
    model, name = given
    model.built_for_structure(name, model.describe(name).vocabulary_size or 1)
