"""A model and the names of its layers, of which no weights are made where its code allows that."""

from pipeline.base.contracts import Trainable
from pipeline.config.experiment import Experiment


def layer_names(experiment: Experiment, vocabulary_size: int) -> list[str]:
    """Return the dotted names of the model's layers, from the first to the last; the vocabulary is the corpus's."""
    plain = experiment.with_random_weights("cpu")
    key = plain.settings.model, repr(plain.model), vocabulary_size
    if key not in _names:
        _names[key] = _built_names(plain, vocabulary_size)
    return _names[key]


_names: dict[tuple[str, str, int], list[str]] = {}


def built_without_weights(plain: Experiment, vocabulary_size: int) -> Trainable:
    """Return the model of a run with random weights, on the meta device where its code allows that."""
    return plain.model.built_for_structure(plain.settings.model, vocabulary_size)


def _built_names(plain: Experiment, vocabulary_size: int) -> list[str]:
    trainable = built_without_weights(plain, vocabulary_size)
    names = {module: name for name, module in trainable.module.named_modules()}
    return [names[layer] for layer in trainable.layers]
