"""Documents of text -> token sequences: tokenized once, and cached on disk."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.base.contracts import CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import cache_folder
from pipeline.base.sequences import PackedSequences, PaddedSequences, TokenStore

SEPARATOR = "<|endoftext|>"
"""The token between two packed documents."""
HELD_OUT_EVERY = 10
"""One document of so many is held out for evaluation."""


def prepare_text(read: Callable[[], Iterable[str]], digest: str, source: str, request: CorpusRequest) -> Prepared:
    """Return the sequences of the documents that `read` yields; `digest` says whether they changed since the last time.

    Raises:
        InvalidInputError: no text, an unusable tokenizer, or a cache folder that cannot be written.

    """
    model = request.description
    own_tokenizer = model.tokenizer if model.needs_tokenizer else None
    key = hashlib.sha256(
        repr((digest, own_tokenizer, request.vocabulary_size, tokenizers.__version__, HELD_OUT_EVERY)).encode()
    ).hexdigest()[:16]
    folder = token_folder(key)
    if not folder.exists():
        _tokenize(list(read()), own_tokenizer, request.vocabulary_size, source, folder)
    sequences = PaddedSequences if request.padded else PackedSequences
    return Prepared(
        train=sequences(TokenStore.open(folder, "train"), request.sequence_length),
        held_out=sequences(TokenStore.open(folder, "held_out"), request.sequence_length),
        vocabulary_size=int((folder / "vocabulary_size").read_text()),
        source=source,
        digest=key,
    )


def token_folder(digest: str) -> Path:
    """Return where the tokens of a prepared corpus with this digest are."""
    return cache_folder() / f"tokens-{digest}"


def digest_of(parts: Iterable[bytes | str]) -> str:
    """Return a digest of these parts, for a cache key."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _tokenize(documents: list[str], own_tokenizer: str | None, vocabulary_size: int, source: str, folder: Path) -> None:
    """Tokenize into a new folder beside `folder`, then rename it: a reader sees all of it or nothing."""
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InvalidInputError(f"a corpus needs text, and {source} holds none; name another corpus or file")
    if len(documents) < HELD_OUT_EVERY:
        documents = [part for document in documents for part in _cut(document, HELD_OUT_EVERY)]
    encode, separator, size = _published(own_tokenizer) if own_tokenizer else _trained(documents, vocabulary_size)
    tokens = [[*ids, *separator] for ids in encode(documents)]
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    middle = HELD_OUT_EVERY // 2
    TokenStore.write(work, "held_out", tokens[middle::HELD_OUT_EVERY])
    TokenStore.write(work, "train", [ids for i, ids in enumerate(tokens) if i % HELD_OUT_EVERY != middle])
    (work / "vocabulary_size").write_text(str(size))
    try:
        work.rename(folder)
    except OSError:  # another process was faster, with the same content
        shutil.rmtree(work)


def _cut(document: str, parts: int) -> list[str]:
    length = -(-len(document) // parts)
    return [document[start : start + length] for start in range(0, len(document), length)]


Encode = Callable[[list[str]], list[list[int]]]


def _trained(documents: list[str], vocabulary_size: int) -> tuple[Encode, list[int], int]:
    """Return a byte-level BPE trained on `documents`, its separator and its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return (
        lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)],
        [0],  # special tokens come first
        vocabulary_size,
    )


def _published(name: str) -> tuple[Encode, list[int], int]:
    """Return the tokenizer that a model was published with, its separator (if it has one) and its size."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the tokenizer of {name} could not be loaded ({str(error).splitlines()[0]}); check the network and the "
            "name, or give a local folder that holds the tokenizer's files"
        ) from error
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], separator, len(tokenizer)
