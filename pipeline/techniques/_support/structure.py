"""A model in its shape, for what is asked of its modules."""

from pipeline.base.contracts import Model, Trainable

SMALLEST_VOCABULARY = 300
"""Vocabulary size of a model whose corpus would determine it: it changes no layer."""


def built_without_weights(model: Model, name: str) -> Trainable:
    """Return model `name`, of which no weights are made or read if its code allows that.

    Raises:
        InvalidInputError: it cannot be built in its shape.

    """
    if getattr(model, "pretrained", False):
        model = model.model_copy(update={"pretrained": False})
    return model.built_for_structure(name, SMALLEST_VOCABULARY)
