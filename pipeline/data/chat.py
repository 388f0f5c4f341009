"""Conversations: questions and answers, rendered by the model's own chat template, with the loss on the answers."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Literal

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import digest_of
from pipeline.base.progress import progress
from pipeline.base.settings import Settings
from pipeline.data._support.chat_template import (
    ENCODING,
    TEMPLATE,
    ChatTemplate,
    load_chat_template,
    trained_chat_template,
)
from pipeline.data._support.conversation_rows import ConversationEncoder, Found, all_messages
from pipeline.data._support.data_files import find_data_files
from pipeline.data._support.hub_datasets import load_dataset
from pipeline.data._support.rows import READERS, counted, digest_of_files
from pipeline.data._support.shapes import CHOSEN, Reading
from pipeline.data._support.tokenizer import Encoded, tokenizer_identity
from pipeline.data._support.tokenizing import About, Source, encode_all, prepare_tokens

SHIPPED = Path(__file__).with_name("questions.jsonl")
"""Short questions and answers about training, computing and the world."""


class Fields(Settings):
    """The names of fields whose shape is not known: prompt and completion, or messages, are enough."""

    prompt: str | None = None
    """The field with the question: text, or messages."""
    input: str | None = None
    """The field with text that follows the question, after a newline."""
    completion: str | None = None
    """The field with the answer: text, or messages."""
    system: str | None = None
    """The field with the system prompt."""
    history: str | None = None
    """The field with earlier questions and answers, a list of pairs."""
    messages: str | None = None
    """The field with the turns of a conversation."""
    role: str | None = None
    """The field of a turn with its role, if it is neither role nor from."""
    content: str | None = None
    """The field of a turn with its text, if it is neither content nor value."""
    tools: str | None = None
    """The field with the tools that the conversation declares."""


class Chat(Corpus):
    """Conversations of files or a dataset: messages, ShareGPT, Alpaca, Dolly, prompt/completion, question/answer."""

    path: Path | None = None
    """.jsonl, .json, .csv, .parquet or .arrow files (also .gz, .bz2, .xz): one, a pattern with *, or a folder, of which
    the split train is read; none: the dataset chat.name, or short questions and answers that Fitproof has."""
    name: str | None = None
    """A dataset's name on the Hugging Face hub, or a local folder of data files."""
    config: str | None = None
    """Name of the dataset's configuration, if it has several."""
    split: str = "train"
    """The split of the dataset to read; part of it is held out."""
    fields: Fields = Fields()
    """Names of the fields, for rows of another shape."""
    train_chosen: bool = False
    """Train the chosen answer of preference pairs (chosen, rejected); the rejected one is not read."""
    unreadable_rows: Literal["refuse", "leave_out"] = "refuse"
    """What to do with rows that have no conversation with an answer: end the command, or go on without them."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the conversations' sequences; a model without a published tokenizer gets one with a template."""
        source = self._source()
        model = request.description
        own = model.tokenizer if model.needs_tokenizer else None
        named = {name: value for name, value in self.fields.model_dump().items() if value is not None}
        chosen = CHOSEN if self.train_chosen else None
        reading = Reading(fields=named, answer=chosen, needs_pairs=model.pairs)
        if model.pairs and request.sequences in ("packed", "packed_documents"):
            raise InvalidInputError(
                f"each answer of a pair is a sequence of its own, and sequences is {request.sequences}; set "
                "sequences=padded, grouped or fixed_length"
            )
        leave_out = self.unreadable_rows == "leave_out"
        setting = f"path {self.path or SHIPPED}" if self.name is None else f"name {self.name}"
        words = f"--corpus chat --chat.{setting}"
        check = partial(Found.check, source=source.name, words=words, leave_out=leave_out)

        def tokenize(store: Callable[[Encoded], None]) -> About:
            template = _template(own, source, reading, check, request.vocabulary_size)
            found, num_targets = Found(), 0

            def keep(batch: Encoded) -> None:
                nonlocal num_targets
                found.update(batch.found)
                num_targets += int(batch.is_target.sum()) if batch.is_target is not None else 0
                store(batch)

            encode = ConversationEncoder(template=template, reading=reading)
            encode_all(source, encode, keep)
            check(found)
            if not num_targets:
                raise InvalidInputError(
                    f"some answer must be trained, and those of {source.name} are all marked as not to be (weight: 0, "
                    "train: false); name another source"
                )
            return About(
                vocabulary_size=len(template.tokenizer) if own else request.vocabulary_size,
                notes=found.notes,
                is_plain=not (found.num_converted or found.refused),
            )

        identity = (
            source.digest,
            tokenizer_identity(own) if own else TEMPLATE,
            request.vocabulary_size,
            ENCODING,
            version("transformers"),
            reading,
            leave_out,
        )
        prepared = prepare_tokens(tokenize, identity, source, request, pairs=model.pairs)
        if request.sequences != "packed" and not len(prepared.train):
            raise InvalidInputError(
                f"an answer must begin within sequence_length tokens, and in {source.name} none does in the first "
                f"{request.sequence_length}; set a longer sequence_length"
            )
        return prepared

    def _source(self) -> Source:
        """Return the source that the settings name."""
        if self.path is not None and self.name is not None:
            raise InvalidInputError(
                f"chat reads one source, and chat.path={self.path} and chat.name={self.name} are two; set one of them"
            )
        of_dataset = self.name is not None or (self.path is not None and self.path.expanduser().is_dir())
        if not of_dataset and (self.config is not None or self.split != "train"):
            raise InvalidInputError(
                f"chat.config and chat.split are of a dataset, and chat.name is none (chat.config is "
                f"{self.config or 'none'}, chat.split {self.split}); set chat.name, or leave them out"
            )
        if self.name is not None:
            dataset = load_dataset("chat", self.name, self.config, self.split)
            return Source(
                name=f"{self.name} ({self.split})",
                digest=digest_of([dataset._fingerprint]),
                read=partial(counted, dataset),
                amount=len(dataset),
            )
        path = self.path or SHIPPED
        files = find_data_files(path, "chat.path", tuple(READERS), self.config, self.split)
        return Source(
            name=f"Fitproof's {path.name}" if path == SHIPPED else str(path),
            digest=digest_of_files(files.files),
            read=lambda count: chain.from_iterable(files.rows(file, count) for file in files.files),
            amount=files.num_bytes,
            note=files.note,
        )


def _template(
    own: str | None, source: Source, reading: Reading, check: Callable[[Found], None], vocabulary_size: int
) -> ChatTemplate:
    """Return the chat template of the tokenizer `own`, or one with a tokenizer that is trained on the conversations."""
    if own:
        return load_chat_template(own)
    with progress(f"training a tokenizer on {source.name}", source.amount) as count:
        return trained_chat_template(all_messages(source.read(count), reading, check), vocabulary_size)
