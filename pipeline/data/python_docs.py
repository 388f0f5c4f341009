"""The reference text of CPython itself (`pydoc_data.topics`): 465 kB of English, without a download."""

from pydoc_data.topics import topics
from sys import version_info

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.data._support.tokenizing import prepare_documents


class PythonDocs(Corpus):
    """The topics of Python's language reference, one document each."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the topics' sequences; their text depends on the version of Python."""
        documents = [topics[name] for name in sorted(topics)]
        name = f"pydoc_data.topics of Python {version_info.major}.{version_info.minor}.{version_info.micro}"
        return prepare_documents(name, documents, request)
