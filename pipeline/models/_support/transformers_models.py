"""Models of transformers' classes, and what is known of one by its configuration, without building it."""

import os
from abc import abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from torch._C._autograd import _profiler_enabled

from pipeline.base.contracts import Model
from pipeline.data._support.checkpoints import check_weights, hub_or_cache
from pipeline.models._support.tasks import CLASSES, OF_PAIRS

ATTENTION = ("eager", "sdpa", "flash_attention_2")
"""Implementations of attention in transformers; the presets have all of them."""
IN_ONE_THREAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Has transformers load weights without threads: a profiler counts what its own thread allocates alone."""
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


class TransformersModel(Model):
    """A model of transformers, with random or pretrained weights."""

    task: ClassVar[str]
    """What it is trained for: the name of its file."""

    pretrained: bool = False
    """Load the published weights (from the hub, the hub's local cache or a folder) instead of random weights."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "task" not in cls.__dict__:
            cls.task = cls.__module__.rpartition(".")[2]

    @property
    def auto_class(self) -> str:
        """The name of the class of transformers that builds it."""
        return (CLASSES | OF_PAIRS)[self.task]

    @abstractmethod
    def configuration(self, name: str, vocabulary_size: int) -> Any:
        """Return transformers' configuration of model `name`, changed by the settings of this family."""

    def module(self, name: str, vocabulary_size: int) -> nn.Module:
        """Return transformers' module of the model, to be trained, in float32."""
        import transformers

        auto, config = getattr(transformers, self.auto_class), self.configuration(name, vocabulary_size)
        if self.pretrained:
            with patch.dict(os.environ, IN_ONE_THREAD if _profiler_enabled() else {}), hub_or_cache(name):
                module = auto.from_pretrained(name, config=config, dtype="float32", trust_remote_code=False)
        else:
            module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        trained: nn.Module = module.train()
        return trained

    def check_weights(self, name: str) -> None:
        """Check the files of pretrained weights."""
        if self.pretrained:
            check_weights(name, f"{self.task}.pretrained")

    def identity(self, name: str) -> str:
        """Return its configuration, whose file may change."""
        return str(vars(self.configuration(name, 1)))

    def attention_implementations(self, name: str) -> tuple[str, ...]:
        """Return those of its class, which is imported and asked."""
        return attention_implementations(self.auto_class, self.configuration(name, 1).model_type)

    def published_type(self, config: Any) -> str | None:
        """Return the type of the checkpoint that it begins with, by which transformers loads its weights."""
        dtype = getattr(config, "dtype", None)
        return str(dtype).removeprefix("torch.") if self.pretrained and dtype is not None else None


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
