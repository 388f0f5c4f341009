"""Checks that models can be built in their shapes, before anything runs."""

from collections.abc import Iterable

from pipeline.base.contracts import Model
from pipeline.base.user_functions import is_function_name
from pipeline.config.experiment import Experiment
from pipeline.runtime.worker_pool import run_in_worker


def check_shapes(experiments: Iterable[Experiment]) -> None:
    """Build each distinct model, without its weights, in a worker process that has imported transformers already.

    Raises:
        InvalidInputError: a model cannot be built in its shape.

    """
    for name, model in {(one.settings.model, one.model): None for one in experiments}:
        is_default_shape = name in model.names and model == type(model)()
        has_shape_of_its_own = getattr(model, "pretrained", False) or is_function_name(name)
        if not is_default_shape and not has_shape_of_its_own:
            run_in_worker(_build, (model, name))


def _build(given: tuple[Model, str]) -> None:
    model, name = given
    model.built_for_structure(name, model.describe(name).vocabulary_size or 1)
