"""The names of a model's layers, of which no weights are made where its code allows that."""

import torch

from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment


def layer_names(experiment: Experiment, vocabulary_size: int) -> list[str]:
    """Return the dotted names of the model's layers, from the first to the last; the vocabulary is the corpus's."""
    plain = experiment.with_random_weights("cpu")
    try:
        with torch.device("meta"):
            trainable = plain.model.build(plain.settings.model, vocabulary_size)
    except InvalidInputError:  # a model that cannot be built without real tensors
        trainable = plain.model.build(plain.settings.model, vocabulary_size)
    names = {module: name for name, module in trainable.module.named_modules()}
    return [names[layer] for layer in trainable.layers]
