"""Classifiers of each token of a text, of transformers."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, PositiveInt
from torch import Tensor

from pipeline.base.contracts import Batch
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.models._support.task_models import MakeInputs, TextTask


class TokenClassification(TextTask):
    """AutoModelForTokenClassification: texts of the corpus, with a made-up label for each token."""

    made_of: ClassVar[str] = "texts of the corpus, with a made-up label for each token"

    num_labels: PositiveInt | None = Field(default=None, ge=2)
    """Number of classes; none: the configuration's."""

    def make_inputs(self, name: str, seed: int) -> MakeInputs:
        """Return token ids, and for each the remainder of its id by the number of labels."""
        num_labels = self.configuration(name, 1).num_labels

        def make(ids_BT: Tensor, is_token_BT: Tensor, rows: Sequence[int]) -> Batch:
            del rows
            return {"input_ids": ids_BT, "labels": (ids_BT % num_labels).masked_fill(~is_token_BT, IGNORED_LABEL)}

        return make

    def _completed(self, config: Any) -> Any:
        if self.num_labels is not None:
            config.num_labels = self.num_labels
        return config
