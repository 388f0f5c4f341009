"""Causal language models of transformers, by preset, folder or hub name, whatever they are trained for."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import Field, PositiveInt
from torch import nn

from pipeline.base.contracts import Description
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.checkpoints import read_configuration
from pipeline.models._support.published_shapes import HUB_NAMES, MULTIMODAL, SHAPES
from pipeline.models._support.transformers_models import ATTENTION, TransformersModel, has_tokenizer, position_limit

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
SHAPE = ("hidden_size", "num_attention_heads", "num_key_value_heads")
"""The names of the width and of the numbers of heads there."""
FEED_FORWARD = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
"""The names of the feed-forward width there."""
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")
"""The names of dropout in transformers' configurations."""
ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""The names of the activation function there."""


class CausalModel(TransformersModel):
    """A causal language model of transformers, with random or pretrained weights."""

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

    def describe(self, name: str) -> Description:
        """Return the description that the configuration gives.

        A folder without tokenizer files needs no tokenizer for random weights: the corpus's own serves.
        """
        return _description_of_preset(self, name) if self._is_preset(name) else _description(self, name)

    def identity(self, name: str) -> str:
        """Return nothing for a preset; of any other model its configuration, whose file may change."""
        return "" if self._is_preset(name) else super().identity(name)

    def attention_implementations(self, name: str) -> tuple[str, ...]:
        """Return all for a preset; the class of any other model is imported and asked."""
        return ATTENTION if name in PRESETS else super().attention_implementations(name)

    def configuration(self, name: str, vocabulary_size: int) -> Any:
        """Return transformers' configuration of model `name`, changed by the settings of this family."""
        from transformers import AutoConfig

        changes = self._changes()
        if self._is_preset(name):
            values = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, **PRESETS[name]}
            values |= self._in_proportion(values) | changes
            values["vocab_size"] = values["vocab_size"] or vocabulary_size
            return AutoConfig.for_model(**values | self._dropouts(values))
        if name in UNPUBLISHED:
            raise InvalidInputError(f"{name} has no published weights; set {self.task}.pretrained=false, or model=gpt2")
        if name in HUB_NAMES:
            remedy = f"set model={HUB_NAMES[name]}"
            if name in MULTIMODAL:
                remedy = f"{HUB_NAMES[name]} takes images too, so save its text model to a folder and name that"
            raise InvalidInputError(f"{name} is a shape without weights; {remedy}, or set {self.task}.pretrained=false")
        config = read_configuration(name, pretrained=self.pretrained)
        config.use_cache = False
        if not hasattr(config, "num_hidden_layers"):
            raise InvalidInputError(
                f"model must be a language model alone, and {name} is a {config.model_type} without layers of its own; "
                "name another model, or a folder with its text model"
            )
        if getattr(config, "is_decoder", None) is False:  # BERT and its like attend to both sides otherwise
            config.is_decoder = True
        own = {name: getattr(config, name, None) for name in (*SHAPE, *FEED_FORWARD)}
        for key, value in {**self._in_proportion(own), **changes, **self._dropouts(config.to_dict())}.items():
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
                f"set {self.task}.pretrained=false or leave the shape alone"
            )
        return changes

    def _in_proportion(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Return the feed-forward width and the heads that share keys, for this width and number of heads."""
        known = {name: value for name, value in values.items() if isinstance(value, int)}  # else one for each layer
        width, heads, shared = map(known.get, SHAPE)
        scaled = {}
        if self.width and width:
            scaled = {name: known[name] * self.width // width for name in FEED_FORWARD if name in known}
        if self.num_heads and heads and shared:
            scaled["num_key_value_heads"] = max(1, self.num_heads // max(1, heads // shared))
        return scaled

    def _dropouts(self, values: dict[str, Any]) -> dict[str, float]:
        if self.dropout is None:
            return {}
        known = {**values, **(dict.fromkeys(DROPOUTS[:3], 0.1) if values["model_type"] == "gpt2" else {})}
        return {name: self.dropout for name in DROPOUTS if name in known}


def _activation(config: Any) -> str | None:
    """Return the name of the activation function in a configuration of transformers."""
    return next((value for name in ACTIVATIONS if isinstance(value := getattr(config, name, None), str)), None)


def _description(family: CausalModel, name: str) -> Description:
    config = family.configuration(name, 1)
    published = name not in UNPUBLISHED
    has_own_tokenizer = published and has_tokenizer(name)
    return Description(
        max_sequence_length=position_limit(config),
        vocabulary_size=family.vocabulary_size or (config.vocab_size if published else None),
        tokenizer=HUB_NAMES.get(name, name) if has_own_tokenizer or family.pretrained else None,
        needs_tokenizer=family.pretrained or (has_own_tokenizer and name not in PRESETS),
        activation=_activation(config),
        published_type=family.published_type(config),
    )


@lru_cache
def _description_of_preset(family: CausalModel, name: str) -> Description:
    return _description(family, name)


def decoder_layers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the decoder's blocks: the list with as many modules as the configuration has layers."""
    count = module.config.num_hidden_layers  # type: ignore[union-attr]
    blocks = next(m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return tuple(blocks)
