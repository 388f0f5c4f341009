"""The typical optimizer step of a run: its tokens, and how much shorter its micro-batches are than the longest one."""

from dataclasses import dataclass

import numpy as np

from pipeline.base.contracts import Prepared
from pipeline.base.user_functions import is_function_name
from pipeline.config.experiment import Experiment
from pipeline.data._support.sequences import DynamicallyPaddedSequences
from pipeline.memory.meter import WATCHED_STEPS
from pipeline.training.loop import rows_of_step

LARGEST_NUM_STEPS = 32
"""Number of optimizer steps over which means are taken, at most."""


@dataclass(frozen=True, kw_only=True)
class TypicalStep:
    """The mean of a run's optimizer steps after those that are padded to the longest sequence of the corpus."""

    num_tokens: float
    """Tokens without padding."""
    num_positions: float
    """The same with padding."""
    share: float
    """Its tokens with padding, as a share of those of a step of the longest sequences."""
    square_share: float
    """The same of the squares of the lengths, as which the work of attention grows."""

    @property
    def tokens_per_position(self) -> float:
        """The share of its tokens that is no padding."""
        return self.num_tokens / self.num_positions


def typical_step(experiment: Experiment, prepared: Prepared) -> TypicalStep:
    """Return the typical optimizer step; all steps are alike if all sequences are padded to one length."""
    train, batch_size = prepared.train, experiment.effective_batch_size
    if not isinstance(train, DynamicallyPaddedSequences):
        return TypicalStep(
            num_tokens=batch_size * train.mean_tokens(),
            num_positions=float(batch_size * train.num_positions(train.batch([0]))),
            share=1.0,
            square_share=1.0,
        )
    settings, lengths = experiment.settings, train.lengths
    numbers = range(WATCHED_STEPS, max(min(settings.num_steps, LARGEST_NUM_STEPS), WATCHED_STEPS + 1))
    steps = [rows_of_step(len(train), number, batch_size, settings.seed) for number in numbers]
    parts = [part for rows in steps for part in train.parts(rows, experiment.micro_batch_size)]
    shares = np.array([lengths[part].max() for part in parts]) / train.padded_length
    return TypicalStep(
        num_tokens=float(np.mean([train.num_tokens(rows) for rows in steps])),
        num_positions=float(batch_size * train.documents_each * train.padded_length * shares.mean()),
        share=float(shares.mean()),
        square_share=float((shares**2).mean()),
    )


def lengths_note(experiment: Experiment) -> str | None:
    """Return a sentence about what peaks and times are of, if micro-batches differ in length; None if they do not."""
    train = experiment.read_corpus().train if experiment.lengths_vary else None
    if not isinstance(train, DynamicallyPaddedSequences):
        return None
    return (
        f"sequences={experiment.settings.sequences}: peaks are those of the longest micro-batch, of "
        f"{train.padded_length:,} tokens a sequence, which the first {WATCHED_STEPS} optimizer steps have; "
        "times are those of the steps after them"
    )


def evaluation_note(experiment: Experiment) -> str | None:
    """Return a sentence if a user's own corpus holds out longer sequences than it trains on; None if it does not."""
    settings = experiment.settings
    if not settings.eval_steps or not is_function_name(settings.corpus):
        return None
    prepared = experiment.read_corpus()
    trained, evaluated = (
        each.num_positions(each.batch([0])) if len(each) else 0 for each in (prepared.train, prepared.held_out)
    )
    if evaluated <= trained:
        return None
    return (
        f"{settings.corpus} holds out sequences of {evaluated:,} tokens and trains on {trained:,}: predicted peaks are "
        "those of the training, and evaluation may need more; make them equally long, or set eval_steps=0"
    )
