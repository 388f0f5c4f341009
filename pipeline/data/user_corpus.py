"""Corpora returned by the user's own function, named as path.to.module:function."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.errors import InvalidInputError
from pipeline.base.files import digest_of
from pipeline.base.user_functions import call, digest, is_function_name, user_code_error
from pipeline.data._support.tokenizer import Encoded
from pipeline.data._support.tokenizing import About, Source, prepare_documents, prepare_tokens


class UserCorpus(Corpus):
    """The result of build(request): texts, a tensor [N, T] of token ids, or a Prepared."""

    @classmethod
    def opens(cls, name: str) -> bool:
        """Whether `name` has the form path.to.module:function."""
        return is_function_name(name)

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences; the function is called once in a process, and again after its file has changed."""
        return _prepared(request, digest(request.name))


@lru_cache(maxsize=4)
def _prepared(request: CorpusRequest, code: str) -> Prepared:
    del code
    result = call(request.name, request)
    if isinstance(result, Prepared):
        return result
    if isinstance(result, Tensor):
        return _of_tokens(result, request)
    return prepare_documents(request.name, _documents(result, request.name), request)


def _documents(result: Any, name: str) -> list[str]:
    """Return the texts of an iterable, which may be a generator."""
    wrong = type(result).__name__
    if isinstance(result, Iterable) and not isinstance(result, str | bytes):
        try:
            documents = list(result)
        except Exception as error:  # the user's generator may raise anything
            raise user_code_error(name, error) from error
        others = [document for document in documents if not isinstance(document, str)]
        if not others:
            return documents
        wrong = f"a {wrong} with a {type(others[0]).__name__}"
    raise InvalidInputError(
        f"{name} must return texts, one a document, or a tensor [N, T] of token ids (or a Prepared), and returns "
        f"{wrong}; return a list of str"
    )


def _of_tokens(ids_NT: Tensor, request: CorpusRequest) -> Prepared:
    """Return the rows as sequences, of which some are held out."""
    length = request.sequence_length
    if ids_NT.ndim != 2 or ids_NT.shape[1] != length or ids_NT.is_floating_point() or not len(ids_NT):
        raise InvalidInputError(
            f"{request.name} must return integers of the shape [N, sequence_length], and returns {list(ids_NT.shape)} "
            f"of {ids_NT.dtype} at sequence_length={length}; split them to that length, or return texts"
        )
    tokens = ids_NT.to("cpu", torch.int32).flatten().numpy()
    source = Source(name=request.name, digest=digest_of([tokens.tobytes(), str(length)]), read=lambda _: ())

    def tokenize(store: Callable[[Encoded], None]) -> About:
        store(Encoded(tokens=tokens, lengths=np.full(len(ids_NT), length)))
        return About(vocabulary_size=int(ids_NT.max()) + 1)

    return prepare_tokens(tokenize, (source.digest,), source, replace(request, sequences="packed"))
