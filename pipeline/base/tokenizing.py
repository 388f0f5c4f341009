"""Tokenization of text documents into sequences, cached on disk."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.base.checkpoints import why_unread
from pipeline.base.contracts import CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder
from pipeline.base.sequences import TokenStore, make_sequences

SEPARATOR = "<|endoftext|>"
"""The token after each document."""
HELD_OUT_EVERY = 10
"""One document of this many is held out for evaluation; of fewer documents than half as many, the second."""
TOKENIZER_SUFFIXES = (".jinja", ".json", ".model", ".tiktoken", ".txt")
"""Of a folder's files that may decide how its tokenizer works; weights have others."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """The documents of a corpus as token ids."""

    documents: Sequence[Sequence[int]]
    vocabulary_size: int
    is_target: Sequence[Sequence[bool]] | None = None
    """For each document, whether each token is a target of the loss; None: all are."""


def prepare_text(read: Callable[[], Iterable[str]], digest: str, source: str, request: CorpusRequest) -> Prepared:
    """Return the sequences of the documents that `read` yields, from the cache if `digest` is that of an earlier call.

    Raises:
        InvalidInputError: no text, an unusable tokenizer, or a cache folder that cannot be written.

    """
    model = request.description
    own_tokenizer = model.tokenizer if model.needs_tokenizer else None

    def tokenize() -> Tokenized:
        return _tokenize(list(read()), own_tokenizer, request.vocabulary_size, source)

    identity = (digest, own_tokenizer and tokenizer_identity(own_tokenizer), request.vocabulary_size)
    return prepare_tokens(tokenize, identity, source, request)


def prepare_tokens(
    tokenize: Callable[[], Tokenized], identity: tuple[object, ...], source: str, request: CorpusRequest
) -> Prepared:
    """Return the sequences of the documents that `tokenize` returns, which is called if no equal `identity` is cached.

    Raises:
        InvalidInputError: the cache folder cannot be written, or `tokenize` raises it.

    """
    key = hashlib.sha256(repr((*identity, tokenizers.__version__, HELD_OUT_EVERY)).encode()).hexdigest()[:16]
    folder = token_folder(key)
    if not folder.exists():
        _write(tokenize(), folder)
    train, held_out = (
        make_sequences(request.sequences, TokenStore.open(folder, name), request.sequence_length)
        for name in ("train", "held_out")
    )
    return Prepared(
        train=train,
        held_out=held_out,
        vocabulary_size=int((folder / "vocabulary_size").read_text()),
        source=source,
        digest=key,
    )


def token_folder(digest: str) -> Path:
    """Return the cache folder of the tokens of a corpus with this digest."""
    return cache_folder() / f"tokens-{digest}"


def digest_of(parts: Iterable[bytes | str]) -> str:
    """Return the SHA-256 digest of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _tokenize(documents: list[str], own_tokenizer: str | None, vocabulary_size: int, source: str) -> Tokenized:
    """Return the documents' tokens, each document followed by a separator if the tokenizer has one."""
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InvalidInputError(f"a corpus needs text, and {source} has none; name another corpus or file")
    if len(documents) < HELD_OUT_EVERY:
        documents = [part for document in documents for part in _split(document, HELD_OUT_EVERY)]
    if own_tokenizer:
        own = load_tokenizer(own_tokenizer)
        separator = [] if own.eos_token_id is None else [own.eos_token_id]
        encoded, size = own(documents, add_special_tokens=False)["input_ids"], len(own)
    else:
        trained = train_tokenizer(documents, vocabulary_size)
        separator = [0]  # the special token has the first id
        encoded, size = [encoding.ids for encoding in trained.encode_batch(documents)], vocabulary_size
    return Tokenized(documents=[[*ids, *separator] for ids in encoded], vocabulary_size=size)


def _write(tokenized: Tokenized, folder: Path) -> None:
    """Write tokens and vocabulary size into a temporary folder and rename it to `folder`, which is atomic."""
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    numbers = range(len(tokenized.documents))
    held_out = numbers[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY] or numbers[1:2]
    for name, chosen in {
        "held_out": held_out,
        "train": [number for number in numbers if number not in held_out],
    }.items():
        is_target = None if tokenized.is_target is None else [tokenized.is_target[number] for number in chosen]
        TokenStore.write(work, name, [tokenized.documents[number] for number in chosen], is_target)
    (work / "vocabulary_size").write_text(str(tokenized.vocabulary_size))
    try:
        work.rename(folder)
    except OSError:  # another process has written the same content
        shutil.rmtree(work)


def _split(document: str, num_parts: int) -> list[str]:
    length = -(-len(document) // num_parts)
    return [document[start : start + length] for start in range(0, len(document), length)]


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
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the tokenizer of {name} could not be loaded: {why_unread(error)} with the tokenizer's files"
        ) from error
