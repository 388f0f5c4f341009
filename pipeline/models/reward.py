"""Reward models: causal language models with a score, which is to be larger for the chosen answer of a pair."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Trainable
from pipeline.models._support.causal_models import decoder_layers
from pipeline.models._support.pairs import PairModel
from pipeline.models._support.tasks import check_task


class Reward(PairModel):
    """AutoModelForSequenceClassification with one score, of pairs of a chosen and a rejected answer."""

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model with a score in place of its head."""
        module = self.module(name, vocabulary_size)
        return Trainable(module=module, layers=decoder_layers(module), loss=_preference_loss)

    def configuration(self, name: str, vocabulary_size: int) -> Any:
        """Return the configuration with one score, and the token of padding: the score is that of the one before."""
        config = super().configuration(name, vocabulary_size)
        check_task(name, config.model_type, "sequence_classification")
        config.num_labels = 1
        if getattr(config, "pad_token_id", None) is None:
            ends = config.eos_token_id
            config.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
        return config

    def padding_token(self, name: str) -> int:
        """Return the one of the configuration."""
        token: int = self.configuration(name, 1).pad_token_id
        return token


def _preference_loss(module: nn.Module, batch: Batch, num_pairs: int) -> Tensor:
    """Return the summed loss of the pairs divided by `num_pairs`."""
    scores: Tensor = module(input_ids=batch["input_ids"].flatten(0, 1), use_cache=False).logits
    scores_B2 = scores.float().view(-1, 2)
    return -F.logsigmoid(scores_B2[:, 0] - scores_B2[:, 1]).sum() / num_pairs
