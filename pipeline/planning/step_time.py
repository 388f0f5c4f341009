"""Seconds of an optimizer step from its work: how much of each kind there is, and what one unit of it costs.

    seconds of a pass = max(sum over kinds of amount x cost, that over calls on the host) on a GPU, their sum on a CPU
    seconds of a step = passes x seconds of a pass + seconds of the update

What ranks send is one of the kinds of the sum if nothing of it overlaps with computing; if all does that may, it is a
third part of the maximum. The truth lies between.

A cost is the time of one FLOP in a number format, those of attention in one kernel apart, or of one byte; on the host
that of launching one operator, or of its call into Python. On a GPU operators are launched while earlier ones
are computed, so the slower of both sets the time; on a CPU each begins when the one before has ended. N counts
configurations, K kinds of work, P parts of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.memory.collectives import WAITED_FOR, group_of
from pipeline.memory.work import ATTENTION, Work
from pipeline.prediction.prediction import Prediction
from pipeline.simulation.links import Links

Array = NDArray[np.float64]

FORMATS = ("float32", "tf32", "bfloat16", "float16", "float8")
OTHER_FORMATS = {"float64": "float32", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}
"""Formats by the one as which they count."""
ATTENTIONS = tuple(name + ATTENTION for name in FORMATS)
CALLS = ("launch", "python_call")
"""Kinds of work of the host: the launch of an operator, and its call into Python."""
SENT = ("waited_bytes", "sent_bytes")
"""Kinds of work of the link between ranks: what is waited for, and what may overlap with other work."""
KINDS = (*FORMATS, *ATTENTIONS, "moved_bytes", "host_bytes", *SENT, *CALLS)
"""Kinds of work, in the order of their costs; those of the host are the last."""

EXPOSED = 0.2
"""Expected share, of the time that overlapping could save, that it does not.

With it the times of 23 published FSDP trainings on 8 to 512 H100, with 2,048 tokens, vary the least from the estimates
(benchmarks/throughput).
"""


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
    links: Links | None = None
    """What connects the ranks, of which the costs have that within a machine; None: all are in one machine."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated time of an optimizer step."""

    overlapped_seconds: float
    """If all overlaps that ranks send while they compute."""
    serial_seconds: float
    """If none of it does."""
    deviation: float
    """Standard deviation of the logarithm of `seconds`: 0.2 is about 20 %."""

    @property
    def seconds(self) -> float:
        """What is expected between both."""
        return self.overlapped_seconds + EXPOSED * (self.serial_seconds - self.overlapped_seconds)


def amounts(work: Work, links: Links | None = None) -> Array:
    """Return how much work there is of each kind, in the order of KINDS.

    What is sent between machines counts as the bytes that take as long within one. Formats that KINDS does not name
    count as float16, and float64 as float32: too fast on most cards.
    """
    flops = dict.fromkeys((*FORMATS, *ATTENTIONS), 0.0)
    for kind, count in work.matrix_flops.items():
        name = kind.removesuffix(ATTENTION)
        counted = OTHER_FORMATS.get(name, name if name in FORMATS else "float16")
        flops[counted + kind[len(name) :]] += count
    calls = work.num_kernels, work.num_python_calls
    sent = {True: 0.0, False: 0.0}  # by whether it is waited for
    for name, count in work.sent_bytes.items():
        sent[name.endswith(WAITED_FOR)] += count * (links.slowdown(*group_of(name)) if links else 1)
    return np.array([*flops.values(), work.moved_bytes, work.host_bytes, *sent.values(), *calls], dtype=np.float64)


def seconds_by_kind(amounts_NK: Array, costs_K: Array, *, is_queued: bool, overlaps: bool = False) -> Array:
    """Return the seconds of each kind of some work; in a queue, those of the host or those of all others are 0.

    The last kinds are those of the host; in a queue the slower of both sets the time. What ranks may send while they
    compute is the kind before; if it `overlaps`, it is a part of its own, and the slowest of the three sets the time.
    """
    parts_NK: Array = amounts_NK * costs_K
    if not is_queued:
        return parts_NK
    groups = np.split(parts_NK, [-len(CALLS) - 1, -len(CALLS)] if overlaps else [-len(CALLS)], axis=1)
    slowest_N = np.argmax([group_NK.sum(axis=1) for group_NK in groups], axis=0)
    return np.hstack([group_NK * (slowest_N == number)[:, None] for number, group_NK in enumerate(groups)])


def estimated(prediction: Prediction, num_passes: int, prior: CostPrior) -> StepTime:
    """Return the estimated time of an optimizer step that takes so many passes."""
    one, last = prediction.pass_work, prediction.pass_work + prediction.last_pass_work
    return time_of([(num_passes - 1, one), (1, last), (1, prediction.update_work)], prior)


def time_of(works: Sequence[tuple[int, Work]], prior: CostPrior) -> StepTime:
    """Return the estimated time of an optimizer step from its parts: how often each comes, and its work."""
    times_P = np.array([count for count, _ in works], dtype=np.float64)
    amounts_PK = np.stack([amounts(work, prior.links) for _, work in works])
    costs_K, is_queued = np.exp(prior.log_costs_K), prior.is_queued
    overlapped_K, serial_K = (
        times_P @ seconds_by_kind(amounts_PK, costs_K, is_queued=is_queued, overlaps=overlaps)
        for overlaps in (True, False)
    )
    overlapped, serial = float(overlapped_K.sum()), float(serial_K.sum())
    # The share of a kind is the derivative of the logarithm of the seconds by that of its cost.
    expected_K = overlapped_K + EXPOSED * (serial_K - overlapped_K)
    shares_K = expected_K / expected_K.sum()
    variance = (
        shares_K**2 @ prior.deviations_K**2 + prior.residual**2 + np.log(serial / overlapped) ** 2 / 12
    )  # uniform
    return StepTime(overlapped_seconds=overlapped, serial_seconds=serial, deviation=float(np.sqrt(variance)))
