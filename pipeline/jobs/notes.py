"""What a job says of its corpus and of its peak: what is left out, and what the run would need with other values."""

from dataclasses import replace
from typing import Any

from pipeline.base.units import MIB
from pipeline.config.experiment import Experiment
from pipeline.data._support.sequences import PackedSequences, PaddedSequences, documents_of
from pipeline.data._support.token_store import TokenStore
from pipeline.data._support.truncation import LengthBin, Truncation, length_bins, truncations

TYPES_OF_16_BITS = ("bfloat16", "float16")


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
    longest = experiment.description.max_sequence_length

    def peak_bytes(length: int) -> int | None:
        is_possible = length >= 2 and (longest is None or length <= longest)
        return _peak_bytes_with(experiment, {"sequence_length": length}) if is_possible else None

    return tuple(replace(one, peak_bytes=peak_bytes(one.length)) for one in found)


def document_lengths(experiment: Experiment) -> tuple[LengthBin, ...]:
    """Return the histogram of the lengths of the training documents; nothing if documents are cut."""
    store = _whole_documents(experiment)
    return () if store is None else length_bins(store)


def _whole_documents(experiment: Experiment) -> TokenStore | None:
    """Return the training documents; None if sequences are cut from documents that follow one another."""
    train = documents_of(experiment.read_corpus().train)
    return train.store if isinstance(train, PaddedSequences) else None


def published_type_note(experiment: Experiment) -> str | None:
    """Return what the same fine-tuning of all weights would need if they stayed in the 16 bits of their checkpoint.

    transformers loads them in that type by default. None if it trains other weights: those of an adapter, in bfloat16,
    random ones, or those of another checkpoint.
    """
    name, settings = experiment.description.published_type, experiment.settings
    values = settings.model_dump()
    if name not in TYPES_OF_16_BITS or values["adapter"] != "none" or values["weights"] != "float32":
        return None
    note = f"transformers loads {settings.model} in {name} by default, and here its weights are float32"
    peak_bytes = _peak_bytes_with(experiment, {"weights": "bfloat16"})
    return note if peak_bytes is None else f"{note}; with weights=bfloat16 it would need {peak_bytes / MIB:,.1f} MiB"


def _peak_bytes_with(experiment: Experiment, changes: dict[str, Any]) -> int | None:
    """Return the predicted peak with other values of settings; None if there is no prediction with them."""
    from pipeline.prediction.summary import prediction_of  # imported after the training has started

    try:
        return prediction_of(Experiment(experiment.settings.model_copy(update=changes))).peak_bytes
    except Exception:  # a device or a lever that does not go with them, or any error of the model's code
        return None
