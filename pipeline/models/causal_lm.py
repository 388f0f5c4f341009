"""Causal language models of transformers, which are trained to predict the next token."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from pipeline.base.contracts import Batch, Trainable
from pipeline.base.user_functions import once_of_each
from pipeline.models._support.causal_models import PRESETS, CausalModel, decoder_layers
from pipeline.models._support.document_masks import why_documents_join
from pipeline.models._support.heads import head_of, token_loss, why_inseparable
from pipeline.models._support.tasks import task_of


class CausalLm(CausalModel):
    """Any causal language model of transformers, with random or pretrained weights."""

    names: ClassVar[tuple[str, ...]] = tuple(PRESETS)

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` is a folder or an `owner/name` of the hub, for this task or of no known one."""
        is_named = "/" in name or Path(name).is_dir()
        return is_named and task_of(name) in (None, "causal_lm")

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model, with its own vocabulary size or, if it has none, the corpus's."""
        module = self.module(name, vocabulary_size)
        return Trainable(module=module, layers=decoder_layers(module), loss=_token_loss, head=head_of(module, _logits))

    @once_of_each
    def inseparable_head(self, name: str, soft_cap: bool) -> str | None:
        """Return None for a preset; any other model is built on the meta device and its head is checked."""
        return None if name in PRESETS else why_inseparable(name, self.structure(name), soft_cap)

    @once_of_each
    def inseparable_documents(self, name: str) -> str | None:
        """Return None for a preset; any other model is built on the meta device and called."""
        return None if name in PRESETS else why_documents_join(name, self.structure(name).module)


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    logits_BTV: Tensor = module(input_ids=batch["input_ids"], **positions, use_cache=False).logits
    return logits_BTV


_token_loss = partial(token_loss, _logits)
