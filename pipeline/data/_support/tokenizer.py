"""Tokenizers: trained on text, or of a published model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.base.errors import InvalidInputError
from pipeline.base.files import digest_of
from pipeline.data._support.checkpoints import hub_or_cache, why_unread

SEPARATOR = "<|endoftext|>"
"""The token after each document."""
TOKENIZER_SUFFIXES = (".jinja", ".json", ".model", ".tiktoken", ".txt")
"""Of a folder's files that may decide how its tokenizer works; weights have others."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Some documents as token ids, one after another."""

    tokens: np.ndarray
    """int32."""
    lengths: np.ndarray
    """int64, the number of tokens of each document."""
    is_target: np.ndarray | None = None
    """bool, whether each token is a target of the loss; None: all are."""
    found: Any = None
    """What the encoder has to say of the rows that it was given."""


def joined(documents: Sequence[Sequence[int]], kind: type[np.generic] = np.int32) -> np.ndarray:
    """Return the values of all documents one after another."""
    return np.fromiter(chain.from_iterable(documents), kind, sum(map(len, documents)))


@dataclass(frozen=True)
class TextEncoder:
    """Texts as token ids, each followed by a separator if the tokenizer has one."""

    tokenizer: Any
    """One of the package tokenizers, or one of transformers."""
    separator: int | None

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Return the texts as token ids."""
        if isinstance(self.tokenizer, Tokenizer):
            documents = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        else:
            without = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
            documents = self.tokenizer(list(texts), **without)["input_ids"]
        if self.separator is not None:
            documents = [[*ids, self.separator] for ids in documents]
        return Encoded(tokens=joined(documents), lengths=np.array(list(map(len, documents)), dtype=np.int64))


def train_tokenizer(
    documents: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str] = (SEPARATOR,)
) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on the documents; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenizer_identity(name: str) -> str:
    """Return what tells the tokenizer of a published model or a folder from others: its name, and a folder's files."""
    folder = Path(name)
    found = sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*")))
    files = [file for file in found if file.suffix in TOKENIZER_SUFFIXES and file.is_file()]
    return f"{name} {digest_of(part for file in files for part in (file.name, file.read_bytes()))}" if files else name


def load_tokenizer(name: str) -> Any:
    """Return transformers' tokenizer of a published model or a folder.

    Raises:
        InvalidInputError: it cannot be loaded.

    """
    from transformers import AutoTokenizer

    try:
        with hub_or_cache(name):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the tokenizer of {name} could not be loaded: {why_unread(error)} with the tokenizer's files"
        ) from error
