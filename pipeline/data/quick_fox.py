"""One English sentence, repeated: a corpus for quick tests, which a model learns within a few optimizer steps."""

from pydantic import PositiveInt

from pipeline.base.contracts import Corpus, CorpusRequest, Prepared
from pipeline.base.files import digest_of
from pipeline.data._support.tokenizing import Source, prepare_text

SENTENCE = "The quick brown fox jumps over the lazy dog. "


class QuickFox(Corpus):
    """Documents of one repeated sentence."""

    num_documents: PositiveInt = 1000
    """Documents in the corpus."""
    sentences_per_document: PositiveInt = 50
    """Repetitions of the sentence in each document."""

    def prepare(self, request: CorpusRequest) -> Prepared:
        """Return the sequences of the repeated sentence."""
        document = SENTENCE * self.sentences_per_document
        source = Source(
            name="one sentence, repeated",
            digest=digest_of([document, str(self.num_documents)]),
            read=lambda _: [document] * self.num_documents,
        )
        return prepare_text(source, request)
