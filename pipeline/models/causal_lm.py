"""Causal language models of transformers, by preset, local folder or hub name."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled

from pipeline.base.checkpoints import check_weights, read_configuration
from pipeline.base.contracts import Batch, Description, Model, Trainable
from pipeline.base.document_masks import why_documents_join
from pipeline.base.errors import InvalidInputError
from pipeline.base.heads import head_of, token_loss, why_inseparable
from pipeline.base.published_shapes import HUB_NAMES, MULTIMODAL, SHAPES
from pipeline.base.tasks import task_of
from pipeline.base.transformers_models import (
    ATTENTION,
    attention_implementations,
    has_tokenizer,
    position_limit,
    published_type,
)

NANO: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": None,
}
"""A size that trains on a CPU in seconds; its vocabulary is the corpus's."""

PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-nano": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **NANO},
    "llama-nano": {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 344, **NANO},
    "qwen3-nano": {"model_type": "qwen3", "num_key_value_heads": 2, "intermediate_size": 384, "head_dim": 32, **NANO},
    **SHAPES,
}
UNPUBLISHED = tuple(name for name, values in PRESETS.items() if values["vocab_size"] is None)
"""Presets without published weights, tokenizer and vocabulary size."""
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")
"""The names of dropout in transformers' configurations."""
ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""The names of the activation function there."""
IN_ONE_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Has transformers load weights without threads: a profiler counts what its own thread allocates alone."""


class CausalLm(Model):
    """Any causal language model of transformers, with random or pretrained weights."""

    names: ClassVar[tuple[str, ...]] = tuple(PRESETS)

    pretrained: bool = False
    """Load the published weights (from the hub, the hub's local cache or a folder) instead of random weights."""
    num_layers: PositiveInt | None = None
    """Number of layers; none: the model's own."""
    width: PositiveInt | None = None
    """Channels of each layer; none: the model's own. The feed-forward width is scaled in proportion."""
    num_heads: PositiveInt | None = None
    """Attention heads of each layer; none: the model's own number."""
    vocabulary_size: PositiveInt | None = None
    """Rows of the embedding; none: the model's own number."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout probability; none: the model's own."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` is a preset, or a folder or an `owner/name` of the hub, for this task or of no known one."""
        is_named = "/" in name or Path(name).is_dir()
        return name in PRESETS or (is_named and task_of(name) in (None, "causal_lm"))

    def describe(self, name: str) -> Description:
        """Return the description that the configuration gives.

        A folder without tokenizer files needs no tokenizer for random weights: the corpus's own serves.
        """
        return _description_of_preset(self, name) if self._is_preset(name) else _description(self, name)

    def check_weights(self, name: str) -> None:
        """Check the files of pretrained weights."""
        if self.pretrained:
            check_weights(name)

    def identity(self, name: str) -> str:
        """Return nothing for a preset; of any other model its configuration, whose file may change."""
        return "" if self._is_preset(name) else str(vars(self.configuration(name, 1)))

    def attention_implementations(self, name: str) -> tuple[str, ...]:
        """Return all for a preset; the class of any other model is imported and asked."""
        if name in PRESETS:
            return ATTENTION
        return attention_implementations("AutoModelForCausalLM", self.configuration(name, 1).model_type)

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model, with its own vocabulary size or, if it has none, the corpus's."""
        from transformers import AutoModelForCausalLM

        if self.pretrained:
            with patch.dict(os.environ, IN_ONE_THREAD if _profiler_enabled() else {}):
                module = AutoModelForCausalLM.from_pretrained(
                    name, config=self.configuration(name, vocabulary_size), dtype="float32", trust_remote_code=False
                )
        else:
            config = self.configuration(name, vocabulary_size)
            module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        head = head_of(module, _logits)
        return Trainable(module=module.train(), layers=_layers(module), loss=_token_loss, head=head)

    def inseparable_head(self, name: str, *, soft_cap: bool) -> str | None:
        """Return None for a preset; any other model is built on the meta device and its head is checked."""
        if name in PRESETS:
            return None
        return _why_inseparable(self.model_copy(update={"pretrained": False}), name, soft_cap)

    def inseparable_documents(self, name: str) -> str | None:
        """Return None for a preset; any other model is built on the meta device and called."""
        if name in PRESETS:
            return None
        return _why_documents_join(self.model_copy(update={"pretrained": False}), name)

    def configuration(self, name: str, vocabulary_size: int) -> Any:
        """Return transformers' configuration of model `name`, changed by the settings of this family."""
        from transformers import AutoConfig

        changes = self._changes()
        if self._is_preset(name):
            values = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, **PRESETS[name]}
            if self.width and "intermediate_size" in values:
                values["intermediate_size"] = values["intermediate_size"] * self.width // values["hidden_size"]
            if self.num_heads and "num_key_value_heads" in values:
                groups = values["num_attention_heads"] // values["num_key_value_heads"]
                values["num_key_value_heads"] = max(1, self.num_heads // groups)
            values |= changes
            values["vocab_size"] = values["vocab_size"] or vocabulary_size
            return AutoConfig.for_model(**values | self._dropouts(values))
        if name in UNPUBLISHED:
            raise InvalidInputError(f"{name} has no published weights; set causal_lm.pretrained=false, or model=gpt2")
        if name in HUB_NAMES:
            remedy = f"set model={HUB_NAMES[name]}"
            if name in MULTIMODAL:
                remedy = f"{HUB_NAMES[name]} takes images too, so save its text model to a folder and name that"
            raise InvalidInputError(f"{name} is a shape without weights; {remedy}, or set causal_lm.pretrained=false")
        config = read_configuration(name, pretrained=self.pretrained)
        config.use_cache = False
        if not hasattr(config, "num_hidden_layers"):
            raise InvalidInputError(
                f"model must be a language model alone, and {name} is a {config.model_type} without layers of its own; "
                "name another model, or a folder with its text model"
            )
        if getattr(config, "is_decoder", None) is False:  # BERT and its like attend to both sides otherwise
            config.is_decoder = True
        for key, value in {**changes, **self._dropouts(config.to_dict())}.items():
            setattr(config, key, value)
        return config

    def _is_preset(self, name: str) -> bool:
        """Whether the configuration is one of PRESETS, and no file that may change."""
        return name in PRESETS and not self.pretrained

    def _changes(self) -> dict[str, Any]:
        values = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "num_attention_heads": self.num_heads,
            "vocab_size": self.vocabulary_size,
        }
        changes = {key: value for key, value in values.items() if value is not None}
        if self.pretrained and changes:
            raise InvalidInputError(
                f"pretrained weights have one shape, and {', '.join(changes)} would change it; "
                "set causal_lm.pretrained=false or leave the shape alone"
            )
        return changes

    def _dropouts(self, values: dict[str, Any]) -> dict[str, float]:
        if self.dropout is None:
            return {}
        known = {**values, **(dict.fromkeys(DROPOUTS[:3], 0.1) if values["model_type"] == "gpt2" else {})}
        return {name: self.dropout for name in DROPOUTS if name in known}


def _activation(config: Any) -> str | None:
    """Return the name of the activation function in a configuration of transformers."""
    return next((value for name in ACTIVATIONS if isinstance(value := getattr(config, name, None), str)), None)


def _description(family: CausalLm, name: str) -> Description:
    config = family.configuration(name, 1)
    published = name not in UNPUBLISHED
    has_own_tokenizer = published and has_tokenizer(name)
    return Description(
        kind="tokens",
        max_sequence_length=position_limit(config),
        vocabulary_size=family.vocabulary_size or (config.vocab_size if published else None),
        tokenizer=HUB_NAMES.get(name, name) if has_own_tokenizer or family.pretrained else None,
        needs_tokenizer=family.pretrained or (has_own_tokenizer and name not in PRESETS),
        width=config.hidden_size,
        activation=_activation(config),
        published_type=published_type(config) if family.pretrained else None,
    )


@lru_cache
def _description_of_preset(family: CausalLm, name: str) -> Description:
    return _description(family, name)


def _layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the decoder's blocks: the list with as many modules as the configuration has layers."""
    count = module.config.num_hidden_layers  # type: ignore[union-attr]
    blocks = next(m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return tuple(blocks)


@lru_cache
def _why_inseparable(model: CausalLm, name: str, soft_cap: bool) -> str | None:
    return why_inseparable(name, model.built_for_structure(name, 1), soft_cap)


@lru_cache
def _why_documents_join(model: CausalLm, name: str) -> str | None:
    return why_documents_join(name, model.built_for_structure(name, 1).module)


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    logits_BTV: Tensor = module(input_ids=batch["input_ids"], **positions, use_cache=False).logits
    return logits_BTV


def _token_loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed cross-entropy divided by the window's number of targets, without keeping the model's output.

    It equals transformers' ForCausalLMLoss with num_items_in_batch, which not all models of transformers support.
    """
    return token_loss(_logits(module, batch).float(), batch, num_targets)
