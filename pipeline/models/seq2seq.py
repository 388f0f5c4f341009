"""Encoders with a decoder of transformers, such as T5 and BART."""

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import Tensor

from pipeline.base.contracts import Batch
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.models._support.task_models import MakeInputs, TextTask, with_decoder_start


class Seq2seq(TextTask):
    """AutoModelForSeq2SeqLM: the decoder repeats the first tokens of what the encoder reads."""

    made_of: ClassVar[str] = "the decoder repeats the first tokens of each text of the corpus"

    target_length: PositiveInt | None = None
    """Tokens of the decoder, the first ones of the sequence; none: all of sequence_length."""

    def make_inputs(self, name: str, seed: int) -> MakeInputs:
        """Return token ids for the encoder, and the first of them as labels."""

        def make(ids_BT: Tensor, is_token_BT: Tensor, rows: Sequence[int]) -> Batch:
            del rows
            labels_BT = ids_BT.masked_fill(~is_token_BT, IGNORED_LABEL)
            return {"input_ids": ids_BT, "labels": labels_BT[:, : self.target_length].clone()}

        return make

    def _completed(self, config: Any) -> Any:
        return with_decoder_start(config)
