"""Tokenization of text documents into sequences, cached on disk."""

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
"""The token after each document."""
HELD_OUT_EVERY = 10
"""One document of this many is held out for evaluation."""


def prepare_text(read: Callable[[], Iterable[str]], digest: str, source: str, request: CorpusRequest) -> Prepared:
    """Return the sequences of the documents that `read` yields, from the cache if `digest` is that of an earlier call.

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
    """Return the cache folder of the tokens of a corpus with this digest."""
    return cache_folder() / f"tokens-{digest}"


def digest_of(parts: Iterable[bytes | str]) -> str:
    """Return the SHA-256 digest of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _tokenize(documents: list[str], own_tokenizer: str | None, vocabulary_size: int, source: str, folder: Path) -> None:
    """Write tokens and vocabulary size into a temporary folder and rename it to `folder`, which is atomic."""
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise InvalidInputError(f"a corpus needs text, and {source} has none; name another corpus or file")
    if len(documents) < HELD_OUT_EVERY:
        documents = [part for document in documents for part in _split(document, HELD_OUT_EVERY)]
    encode, separator, size = _load_tokenizer(own_tokenizer) if own_tokenizer else _train(documents, vocabulary_size)
    tokens = [[*ids, *separator] for ids in encode(documents)]
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    middle = HELD_OUT_EVERY // 2
    TokenStore.write(work, "held_out", tokens[middle::HELD_OUT_EVERY])
    TokenStore.write(work, "train", [ids for i, ids in enumerate(tokens) if i % HELD_OUT_EVERY != middle])
    (work / "vocabulary_size").write_text(str(size))
    try:
        work.rename(folder)
    except OSError:  # another process has written the same content
        shutil.rmtree(work)


def _split(document: str, num_parts: int) -> list[str]:
    length = -(-len(document) // num_parts)
    return [document[start : start + length] for start in range(0, len(document), length)]


Encode = Callable[[list[str]], list[list[int]]]


def _train(documents: list[str], vocabulary_size: int) -> tuple[Encode, list[int], int]:
    """Train a byte-level BPE tokenizer; return its encoding function, separator and vocabulary size."""
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
        [0],  # the special token has the first id
        vocabulary_size,
    )


def _load_tokenizer(name: str) -> tuple[Encode, list[int], int]:
    """Load a published tokenizer; return its encoding function, separator (if it has one) and vocabulary size."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"the tokenizer of {name} could not be loaded ({str(error).splitlines()[0]}); check the network and the "
            "name, or give a local folder with the tokenizer's files"
        ) from error
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], separator, len(tokenizer)
