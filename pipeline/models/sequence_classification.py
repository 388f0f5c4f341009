"""Classifiers of whole texts, of transformers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.base.contracts import Batch
from pipeline.models._support.task_models import MakeInputs, TextTask


class SequenceClassification(TextTask):
    """AutoModelForSequenceClassification: texts of the corpus, with made-up labels."""

    made_of: ClassVar[str] = "texts of the corpus, with made-up labels"

    num_labels: PositiveInt | None = Field(default=None, ge=2)
    """Number of classes; none: the configuration's."""

    def make_inputs(self, name: str, seed: int) -> MakeInputs:
        """Return token ids and a label for each sequence, one after the other."""
        num_labels = self.configuration(name, 1).num_labels

        def make(ids_BT: Tensor, is_token_BT: Tensor, rows: Sequence[int]) -> Batch:
            del is_token_BT
            return {"input_ids": ids_BT, "labels": torch.tensor(list(rows)) % num_labels}

        return make

    def _completed(self, config: Any) -> Any:
        if self.num_labels is not None:
            config.num_labels = self.num_labels
        config.problem_type = "single_label_classification"
        if getattr(config, "pad_token_id", None) is None:  # decoders look for the last token that is none
            config.pad_token_id = config.vocab_size - 1
        return config
