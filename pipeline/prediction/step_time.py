"""Seconds of an optimizer step from its work: how much of each kind there is, and what one unit of it costs.

    seconds of a pass = max(sum over kinds of amount x cost, that over calls on the host) on a GPU, their sum on a CPU
    seconds of a step = passes x seconds of a pass + seconds of the update

A cost is the time of one FLOP in a number format, those of attention in one kernel apart, or of one byte; on the host
that of launching one operator, or of its call into Python. On a GPU operators are launched while earlier ones
are computed, so the slower of both sets the time; on a CPU each begins when the one before has ended. N counts
configurations, K kinds of work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.memory.work import ATTENTION, Work
from pipeline.prediction.prediction import Prediction

Array = NDArray[np.float64]

FORMATS = ("float32", "tf32", "bfloat16", "float16")
OTHER_FORMATS = {"float64": "float32"}
"""Formats by the one as which they count."""
ATTENTIONS = tuple(name + ATTENTION for name in FORMATS)
CALLS = ("launch", "python_call")
"""Kinds of work of the host: the launch of an operator, and its call into Python."""
KINDS = (*FORMATS, *ATTENTIONS, "moved_bytes", "host_bytes", *CALLS)
"""Kinds of work, in the order of their costs; those of the host are the last."""


@dataclass(frozen=True, kw_only=True)
class CostPrior:
    """What is known about the costs on a device before anything is measured there: independent log-normals."""

    log_costs_K: Array
    """Means of the logarithms of the costs, in seconds."""
    deviations_K: Array
    """Their standard deviations."""
    residual: float
    """Standard deviation of the logarithm of a step's time with the true costs."""
    is_queued: bool
    """Whether operators are launched while earlier ones are computed, as on a GPU."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated time of an optimizer step."""

    seconds: float
    deviation: float
    """Standard deviation of its logarithm: 0.2 is about 20 %."""


def amounts(work: Work) -> Array:
    """Return how much work there is of each kind, in the order of KINDS.

    Formats that KINDS does not name, as of 8 bits, count as float16, and float64 as float32: too fast on most cards.
    """
    flops = dict.fromkeys((*FORMATS, *ATTENTIONS), 0.0)
    for kind, count in work.matrix_flops.items():
        name = kind.removesuffix(ATTENTION)
        counted = OTHER_FORMATS.get(name, name if name in FORMATS else "float16")
        flops[counted + kind[len(name) :]] += count
    calls = work.num_kernels, work.num_python_calls
    return np.array([*flops.values(), work.moved_bytes, work.host_bytes, *calls], dtype=np.float64)


def seconds_by_kind(amounts_NK: Array, costs_K: Array, *, is_queued: bool) -> Array:
    """Return the seconds of each kind of some work; in a queue, those of the host or those of all others are 0.

    The last kinds are those of the host; in a queue the slower of both sets the time.
    """
    parts_NK: Array = amounts_NK * costs_K
    if not is_queued:
        return parts_NK
    computed_NK, called_NK = np.split(parts_NK, [-len(CALLS)], axis=1)
    is_calling_N1 = called_NK.sum(axis=1, keepdims=True) > computed_NK.sum(axis=1, keepdims=True)
    return np.hstack([computed_NK * ~is_calling_N1, called_NK * is_calling_N1])


def step_seconds_by_kind(
    passes_NK: Array, num_passes_N: Array, updates_NK: Array, costs_K: Array, *, is_queued: bool
) -> Array:
    """Return the seconds of each kind of optimizer steps, from the amounts of one pass and of the update: N x K."""
    of_passes_NK = num_passes_N[:, None] * seconds_by_kind(passes_NK, costs_K, is_queued=is_queued)
    return of_passes_NK + seconds_by_kind(updates_NK, costs_K, is_queued=is_queued)


def step_seconds(passes_NK: Array, num_passes_N: Array, updates_NK: Array, costs_K: Array, *, is_queued: bool) -> Array:
    """Return the seconds of optimizer steps: N x K amounts of one pass and of the update -> N."""
    parts_NK = step_seconds_by_kind(passes_NK, num_passes_N, updates_NK, costs_K, is_queued=is_queued)
    seconds_N: Array = parts_NK.sum(axis=1)
    return seconds_N


def note_on_ranks(largest_world_size: int) -> str | None:
    """Return what the estimated times leave out where configurations have several ranks; None if none has."""
    if largest_world_size == 1:
        return None
    return (
        "world_size: estimated times are those of one rank on a device of its own; the time in which gradients are "
        "added over the ranks, and with sharding=fsdp parameters gathered, depends on how the cards are connected, and "
        "is left out"
    )


def estimated(prediction: Prediction, num_passes: int, prior: CostPrior) -> StepTime:
    """Return the estimated time of an optimizer step that takes so many passes."""
    passes_NK, updates_NK = (amounts(work)[None] for work in (prediction.pass_work, prediction.update_work))
    num_passes_N = np.array([num_passes], dtype=np.float64)
    costs_K = np.exp(prior.log_costs_K)
    [parts_K] = step_seconds_by_kind(passes_NK, num_passes_N, updates_NK, costs_K, is_queued=prior.is_queued)
    seconds = parts_K.sum()
    # The share of a kind is the derivative of the logarithm of the seconds by that of its cost.
    variance = (parts_K / seconds) ** 2 @ prior.deviations_K**2 + prior.residual**2
    return StepTime(seconds=float(seconds), deviation=float(np.sqrt(variance)))
