"""An Experiment -> Prediction: on a CPU by fake tensors, on CUDA by its own run on a simulated card."""

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

from pipeline.base.contracts import Hardware, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.config.experiment import Experiment
from pipeline.memory.breakdown import at_peak
from pipeline.prediction.card_processes import card_processes
from pipeline.prediction.card_run import run_on_card
from pipeline.prediction.cards import variables_on
from pipeline.prediction.cuda_context import context_bytes_of
from pipeline.prediction.fake.trace import trace
from pipeline.prediction.prediction import Prediction
from pipeline.prediction.prediction_cache import cached
from pipeline.training.typical_step import TypicalStep


def predict(
    experiment: Experiment,
    target: Hardware,
    prepared: Prepared | None = None,
    *,
    budget_bytes: int | None = None,
) -> Prediction:
    """Return the predicted memory of a run of `experiment` on `target`.

    One example of the corpus suffices, however large the batch; the corpus is read unless `prepared` is given. Where
    micro-batches differ in length, the peak is that of the first two steps, which are padded to the longest one.
    `budget_bytes` is what a card has for it, by default all beside the CUDA context.

    Raises:
        InvalidInputError: the target does not support it, it reads the values of tensors, or no card can be simulated.

    """
    reason = experiment.unsupported(target)
    if reason is not None:
        raise InvalidInputError(reason)
    if target.kind == "cuda":
        with closing(predict_on_card([experiment], target, prepared, budget_bytes)) as outcomes:
            [(_, outcome)] = outcomes
        if not isinstance(outcome, Prediction):
            raise outcome
        return outcome
    return cached(experiment, target, prepared, _predict_on_cpu)


def _predict_on_cpu(experiment: Experiment, prepared: Prepared, typical: TypicalStep) -> Prediction:
    """Return the prediction from a recording on fake tensors."""
    timeline = trace(experiment, prepared)
    peak = int(timeline.allocated_bytes_E.max())
    return Prediction(
        peak_allocated_bytes=peak,
        smallest_budget_bytes=peak,
        breakdown=at_peak(timeline),
        micro_batch_size=experiment.micro_batch_size,
        pass_work=timeline.pass_work(experiment.accumulation_steps).shortened(typical.share, typical.square_share),
        update_work=timeline.update_work,
        num_tokens=typical.num_tokens,
    )


def predict_on_card(
    experiments: Sequence[Experiment],
    target: Hardware,
    prepared: Prepared | None = None,
    budget_bytes: int | None = None,
    is_recorded: bool = True,
) -> Generator[tuple[int, Prediction | Exception], None, None]:
    """Yield the number of each experiment and its prediction from a simulated card, or why there is none.

    Without a recording it has no work and no breakdown.

    Raises:
        InvalidInputError: no card can be simulated.

    """
    context = context_bytes_of(target)
    free_bytes = target.memory_bytes - context
    budget_bytes = free_bytes if budget_bytes is None else min(budget_bytes, free_bytes)
    run = partial(run_on_card, context_bytes=context, budget_bytes=budget_bytes, is_recorded=is_recorded)
    asked = context, budget_bytes
    work = partial(cached, target=target, prepared=prepared, predict=run, asked=asked, needs_breakdown=is_recorded)
    card = variables_on(target)
    variables = [{**os.environ, **one.environment, **card, **_rank_of(one)} for one in experiments]
    yield from card_processes().call(work, experiments, variables)


def _rank_of(experiment: Experiment) -> dict[str, str]:
    """Return the variable that makes a process the first of several ranks."""
    return {} if experiment.world_size == 1 else {"SIMULATED_CARD_RANK": f"0/{experiment.world_size}"}
