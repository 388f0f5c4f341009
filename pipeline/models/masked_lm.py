"""Masked language models of transformers, such as BERT."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pipeline.base.contracts import Batch
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.data._support.tokenizer import load_tokenizer
from pipeline.models._support.task_models import MakeInputs, TextTask


class MaskedLm(TextTask):
    """AutoModelForMaskedLM: hidden tokens of the corpus are predicted."""

    made_of: ClassVar[str] = "tokens of the corpus are hidden, and predicted"

    masked_share: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens to predict: 80 % of them are masked, 10 % replaced by random ones, 10 % left."""

    def make_inputs(self, name: str, seed: int) -> MakeInputs:
        """Return what DataCollatorForLanguageModeling makes; each sequence has the same mask in every epoch.

        It has one target at least, so that there is a loss whatever the micro-batch.
        """
        description, size = self.describe(name), self.configuration(name, 1).vocab_size
        tokenizer = load_tokenizer(name) if description.needs_tokenizer else None
        mask = size - 1 if tokenizer is None or tokenizer.mask_token_id is None else tokenizer.mask_token_id

        def make(ids_BT: Tensor, is_token_BT: Tensor, rows: Sequence[int]) -> Batch:
            draws_2BT = torch.empty(2, *ids_BT.shape)
            for number, row in enumerate(rows):
                generator = torch.Generator().manual_seed(seed * 2**31 + row)  # whichever batch a sequence is in
                draws_2BT[:, number].uniform_(generator=generator)
            draws_BT = draws_2BT[0].masked_fill(~is_token_BT, 1.0)
            is_target_BT = (draws_BT < self.masked_share) | (draws_BT == draws_BT.amin(dim=1, keepdim=True))
            labels_BT = ids_BT.masked_fill(~is_target_BT, IGNORED_LABEL)
            ids_BT = ids_BT.masked_fill(is_target_BT & (draws_2BT[1] < 0.8), mask)
            others_BT = (draws_2BT[1] * 1e4 * size).long() % size
            return {
                "input_ids": torch.where(is_target_BT & (draws_2BT[1] >= 0.9), others_BT, ids_BT),
                "labels": labels_BT,
            }

        return make
