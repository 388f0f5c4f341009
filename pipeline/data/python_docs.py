"""The reference text of CPython itself (`pydoc_data.topics`): 465 kB of English, without a download."""

from collections.abc import Iterable
from pydoc_data.topics import topics
from sys import version_info

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.files import digest_of
from pipeline.data._support.tokenizing import prepare_text, texts_of


class PythonDocs(Corpus):
    """The topics of Python's language reference, one document each."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the topics' sequences; their text depends on the version of Python."""

        def read() -> Iterable[str]:
            return (topics[name] for name in sorted(topics))

        source = f"pydoc_data.topics of Python {version_info.major}.{version_info.minor}.{version_info.micro}"
        return prepare_text(texts_of(read), digest_of(read()), source, request)
