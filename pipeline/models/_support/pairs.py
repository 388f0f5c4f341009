"""Causal language models that are trained on pairs of a chosen and a rejected answer."""

from dataclasses import replace

from pipeline.base.contracts import Description, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.sequences import MadeUpPairs, PackedSequences, PaddedSequences, PairedSequences
from pipeline.models._support.causal_models import CausalModel


class PairModel(CausalModel):
    """A causal language model whose examples are pairs of answers."""

    def describe(self, name: str) -> Description:
        """Return the description that the configuration gives; examples are pairs."""
        note = (
            f"{name} is trained for {self.task} on pairs of a chosen and a rejected answer, those of corpus=chat, or "
            "of any other corpus made-up ones of two sequences; micro_batch_size and effective_batch_size count pairs"
        )
        return replace(super().describe(name), pairs=True, note=note)

    def inputs(self, name: str, prepared: Prepared, seed: int) -> Prepared:
        """Return the pairs of a corpus or, of one without pairs, made-up ones.

        Raises:
            InvalidInputError: its sequences have no common length.

        """
        train, held_out = prepared.train, prepared.held_out
        if isinstance(train, PairedSequences) and isinstance(held_out, PairedSequences):
            token = self.padding_token(name)
            return replace(prepared, train=train.padded_with(token), held_out=held_out.padded_with(token))
        if type(train) not in (PackedSequences, PaddedSequences):
            raise InvalidInputError(
                f"{self.task} makes pairs of sequences of one length, and those of {prepared.source} vary or have "
                "several documents; set sequences=packed or fixed_length, or corpus=chat, which has pairs"
            )
        digest = f"{prepared.digest}-pairs"
        return replace(prepared, train=MadeUpPairs(train), held_out=MadeUpPairs(held_out), digest=digest)

    def padding_token(self, name: str) -> int:
        """Return the token with which answers are padded; attention is causal, and padding no target."""
        return 0

    def inseparable_head(self, name: str, soft_cap: bool) -> str | None:
        """Return that the loss is of whole answers."""
        return f"{name} is trained for {self.task}, whose loss is of whole answers"

    def inseparable_documents(self, name: str) -> str | None:
        """Return that answers share no sequence."""
        return f"{name} is trained for {self.task}, on one answer in each sequence"
