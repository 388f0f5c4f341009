"""What is known of a model of transformers by its configuration, without building it."""

from functools import lru_cache
from pathlib import Path
from typing import Any

ATTENTION = ("eager", "sdpa", "flash_attention_2")
"""Implementations of attention in transformers; the presets have all of them."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""Files of which a folder with a tokenizer has at least one."""
OFFSET_POSITIONS = ("roberta", "camembert", "mpnet", "xlm-roberta", "data2vec-text", "xmod", "ibert", "longformer")
"""Types whose positions begin behind the id of padding."""


def position_limit(config: Any) -> int | None:
    """Return the longest sequence in tokens for which a model has positions; None if there is no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:  # XLNet writes -1
        return None
    is_offset = getattr(config, "model_type", None) in OFFSET_POSITIONS
    return limit - config.pad_token_id - 1 if is_offset else limit


def has_tokenizer(name: str) -> bool:
    """Whether a model has a tokenizer of its own; what is on the hub has one."""
    return not Path(name).is_dir() or any((Path(name) / file).exists() for file in TOKENIZER_FILES)


def published_type(config: Any) -> str | None:
    """Return the type that a checkpoint's configuration names, by which transformers loads its weights."""
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


@lru_cache
def attention_implementations(auto_class: str, model_type: str) -> tuple[str, ...]:
    """Return the implementations of attention that a built model of this type can be set to."""
    import transformers

    mapping = getattr(transformers, auto_class)._model_mapping
    model: Any = mapping.get(transformers.CONFIG_MAPPING[model_type], None)
    if model is None or not model._can_set_attn_implementation():
        return ()
    has = {"eager": True, "sdpa": model._supports_sdpa, "flash_attention_2": model._supports_flash_attn}
    return tuple(name for name in ATTENTION if has[name])
