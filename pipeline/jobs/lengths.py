"""What a job says of the lengths of its corpus: what is left out, and what truncation at other lengths would cost."""

from dataclasses import replace
from typing import Any

from pipeline.config.experiment import Experiment
from pipeline.data._support.sequences import PackedSequences, PaddedSequences, documents_of
from pipeline.data._support.token_store import TokenStore
from pipeline.data._support.truncation import LengthBin, Truncation, length_bins, truncations


def corpus_notes(experiment: Experiment) -> tuple[str, ...]:
    """Return what was read of the corpus, what was not, and what of it is not trained on, a sentence each."""
    prepared = experiment.read_corpus()
    return (*(f"{prepared.source}: {note}" for note in prepared.notes), *filter(None, (left_out(experiment),)))


def left_out(experiment: Experiment) -> str | None:
    """Return a sentence about what of the corpus is not trained on, since it has no target; None if all of it is."""
    train = documents_of(experiment.read_corpus().train)
    count = train.num_left_out if isinstance(train, PackedSequences | PaddedSequences) else 0
    if not count:
        return None
    length, total = experiment.settings.sequence_length, len(train) + count
    if isinstance(train, PackedSequences):
        return f"{count} of {total} sequences of {length} tokens have no target, and are left out"
    return (
        f"{count} of {total} documents have no target among their first {length} tokens, and are left out; a longer "
        "sequence_length keeps those that go on"
    )


def predicted_truncations(experiment: Experiment) -> tuple[Truncation, ...]:
    """Return what truncation at several lengths loses, with its predicted peak; nothing if documents are cut."""
    store = _whole_documents(experiment)
    found = () if store is None else truncations(store, [experiment.settings.sequence_length])
    return tuple(replace(one, peak_bytes=_peak_bytes(experiment, one.length)) for one in found)


def document_lengths(experiment: Experiment) -> tuple[LengthBin, ...]:
    """Return the histogram of the lengths of the training documents; nothing if documents are cut."""
    store = _whole_documents(experiment)
    return () if store is None else length_bins(store)


def _whole_documents(experiment: Experiment) -> TokenStore | None:
    """Return the training documents; None if sequences are cut from documents that follow one another."""
    train = documents_of(experiment.read_corpus().train)
    return train.store if isinstance(train, PaddedSequences) else None


def _peak_bytes(experiment: Experiment, length: int) -> int | None:
    """Return the predicted peak with sequences of `length` tokens; None if the model cannot take or trace them."""
    from pipeline.prediction.summary import prediction_of  # imported after the training has started

    longest = experiment.description.max_sequence_length
    if length < 2 or (longest is not None and length > longest):
        return None
    changes: dict[str, Any] = {"sequence_length": length}
    try:
        return prediction_of(Experiment(experiment.settings.model_copy(update=changes))).peak_bytes
    except Exception:  # any error of the model's code on fake tensors, as in the run's own prediction
        return None
