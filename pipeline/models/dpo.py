"""Direct preference optimization of causal language models (DPO: https://arxiv.org/abs/2305.18290)."""

from functools import partial

import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Trainable
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.models._support.causal_models import decoder_layers
from pipeline.models._support.heads import shifted_targets
from pipeline.models._support.pairs import PairModel


class Dpo(PairModel):
    """Causal language models that learn to prefer the chosen answer of a pair to the rejected one, by DPO."""

    beta: PositiveFloat = 0.1
    """What the difference of a pair's log-probabilities is multiplied by: the larger, the closer to the reference."""

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model, with the log-probabilities of answers that a reference is to give too."""
        module = self.module(name, vocabulary_size)
        loss = partial(_preference_loss, self.beta)
        return Trainable(module=module, layers=decoder_layers(module), loss=loss, scores=_log_probabilities)


def _log_probabilities(module: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of both answers of each pair, float32 [B, 2]."""
    shape_B2T = batch["input_ids"].shape
    logits_BTV: Tensor = module(input_ids=batch["input_ids"].flatten(0, 1), use_cache=False).logits.float()
    targets = shifted_targets({"labels": batch["labels"].flatten(0, 1)})
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets, ignore_index=IGNORED_LABEL, reduction="none")
    return -losses.view(shape_B2T).sum(dim=-1)


def _preference_loss(beta: float, module: nn.Module, batch: Batch, num_pairs: int) -> Tensor:
    """Return the summed loss of the pairs, compared with a reference if the batch has one, divided by `num_pairs`."""
    ratios_B2 = _log_probabilities(module, batch)
    if "reference" in batch:
        ratios_B2 = ratios_B2 - batch["reference"]
    return -F.logsigmoid(beta * (ratios_B2[:, 0] - ratios_B2[:, 1])).sum() / num_pairs
