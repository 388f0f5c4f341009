"""The policy of each layer that `checkpointing=auto` means: the least recomputation that fits a budget.

A technique knows no prediction, so `auto` is replaced by explicit policies before a run starts, and the run's
configuration has those.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.config.layers import layer_names
from pipeline.memory.device import hardware_of
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.predict import predict
from pipeline.prediction.prediction import Prediction
from pipeline.runtime.worker_pool import run_in_worker
from pipeline.techniques.checkpointing import ATTENTION_SAVED, FULL, NONE, Checkpointing, RefusedPoliciesError, as_text


class Counts(NamedTuple):
    """Numbers of layers by policy, in the order of the layers: those that are freed first store most."""

    full: int
    attention_saved: int
    none: int

    @property
    def text(self) -> str:
        """The value of the setting."""
        return as_text((*(FULL,) * self.full, *(ATTENTION_SAVED,) * self.attention_saved, *(NONE,) * self.none))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a policy costs and keeps for one of the identical layers."""

    flops: float
    """Floating-point operations that are recomputed for a sequence."""
    num_bytes: float
    """Bytes that are kept from the forward pass to the backward pass."""


def resolved(
    experiment: Experiment, target: Hardware | None = None, budget_bytes: int | None = None, **options: Any
) -> Experiment:
    """Return the experiment with explicit policies in place of `checkpointing=auto`; any other as it is, checked.

    `target` and `budget_bytes` are by default those of the experiment, `options` are those of predict(). What is
    predicted, is predicted in a worker process.

    Raises:
        RefusedPoliciesError: the budget is less than what recomputing every layer is predicted to need, or explicit
            policies name layers that the model does not have.
        InvalidInputError: there is no budget, or the model or the corpus cannot be read.

    """
    settings: Any = experiment.settings
    if ":" in settings.checkpointing:
        [technique] = [each for each in experiment.techniques if isinstance(each, Checkpointing)]
        technique.by_layer(len(layer_names(experiment, experiment.read_corpus().vocabulary_size)))
    if settings.checkpointing != "auto":
        return experiment
    budget_bytes = experiment.budget_bytes if budget_bytes is None else budget_bytes
    if budget_bytes is None:
        raise InvalidInputError(
            "checkpointing=auto needs a memory budget, within which it recomputes least, and budget is none; set "
            "budget=8GiB, or another policy"
        )
    target = target or hardware_of(experiment.device)
    key = repr((settings, target, budget_bytes, options))
    if key not in _chosen:
        options = {"context_bytes": context_bytes_of(target), **options}
        choose = partial(_choose, target=target, budget_bytes=budget_bytes, options=options)
        _chosen[key] = choose(experiment) if target.kind == "cuda" else run_in_worker(choose, experiment)
    return _with(experiment, _chosen[key])


def with_policies(
    experiment: Experiment, target: Hardware, budget_bytes: int | None = None
) -> tuple[Experiment, str | None]:
    """Return the resolved experiment, or as it is with the reason why its policies are refused.

    Raises:
        InvalidInputError: as resolved(), for any other reason: it concerns more than this configuration.

    """
    try:
        return resolved(experiment, target, budget_bytes), None
    except RefusedPoliciesError as error:
        return experiment, str(error)


_chosen: dict[str, str] = {}
"""Policies by what they were chosen for: a search asks for the same experiment several times."""


def _choose(experiment: Experiment, target: Hardware, budget_bytes: int, options: Mapping[str, Any]) -> str:
    """Return the policies that recompute least among those that are predicted to fit."""
    prepared = experiment.read_corpus()

    def predicted(text: str) -> Prediction:
        try:
            alike = _with(experiment, text).with_random_weights("cpu")
            return predict(alike, target, prepared, budget_bytes=budget_bytes, **options)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"checkpointing=auto chooses policies by predictions, and there is none: {error}; set another policy"
            ) from error

    leanest = predicted("every_layer")
    if not leanest.fits(budget_bytes):
        peak, budget = leanest.peak_bytes / MIB, budget_bytes / MIB
        raise RefusedPoliciesError(
            f"the budget of checkpointing=auto must hold what recomputing every layer needs, a predicted peak of "
            f"{peak:,.1f} MiB, and is {budget:,.1f} MiB; raise budget to {peak:,.1f} MiB, or lower micro_batch_size"
        )
    frontier = least_recomputation(*_layers(experiment, prepared, predicted))
    number = bisect_left(frontier, True, key=lambda counts: predicted(counts.text).fits(budget_bytes))
    return frontier[number].text if number < len(frontier) else "every_layer"


def least_recomputation(num_layers: int, full: Layer, attention_saved: Layer, none: Layer) -> list[Counts]:
    """Return the solutions of the knapsack for every number of bytes, those that recompute least and keep most first.

    The layers are identical, so that how many have each policy decides: all combinations are compared.
    """
    everything = [
        Counts(num_full, num_saved, num_layers - num_full - num_saved)
        for num_full in range(num_layers + 1)
        for num_saved in range(num_layers - num_full + 1)
    ]

    def total(counts: Counts) -> tuple[float, float]:
        parts = list(zip(counts, (full, attention_saved, none), strict=True))
        return sum(n * layer.flops for n, layer in parts), sum(n * layer.num_bytes for n, layer in parts)

    frontier: list[Counts] = []
    for counts in sorted(everything, key=total):
        if not frontier or total(counts)[1] < total(frontier[-1])[1]:
            frontier.append(counts)
    return frontier


def _layers(
    experiment: Experiment, prepared: Prepared, predicted: Callable[[str], Prediction]
) -> tuple[int, Layer, Layer, Layer]:
    """Return the number of layers, and what each policy costs and keeps, from predictions of all layers under each."""
    num_layers = len(layer_names(experiment, prepared.vocabulary_size))
    layers = []
    for text in ("every_layer", ATTENTION_SAVED, NONE):
        found = predicted(text)
        layers.append(Layer(flops=found.sequence_flops / num_layers, num_bytes=found.kept_bytes / num_layers))
    least = min(layer.flops for layer in layers)
    full, attention_saved, none = (replace(layer, flops=layer.flops - least) for layer in layers)
    return num_layers, full, attention_saved, none


def _with(experiment: Experiment, checkpointing: str) -> Experiment:
    return Experiment(experiment.settings.model_copy(update={"checkpointing": checkpointing}))
