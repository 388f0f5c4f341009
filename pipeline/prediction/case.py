"""What a timeline is of, and the similar cases from which it may follow."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipeline.base.contracts import Description, Hardware, Prepared
from pipeline.base.technique import Technique
from pipeline.config.experiment import Experiment
from pipeline.prediction.fake_batches import OfLength
from pipeline.prediction.trace_cache import trace_file


@dataclass(frozen=True, eq=False)
class Case:
    """What a timeline is of: two optimizer steps of an experiment on a device; cases with the same file are equal."""

    experiment: Experiment
    target: Hardware
    prepared: Prepared
    num_rows: int
    """Sequences in an optimizer step."""
    identity: str | None
    """Of the model, see Model.identity(): with None its timeline is neither cached nor derived."""
    description: Description
    """Of the model, which is read once: it may be in a file."""
    batch: int
    """The effective batch of the training; the experiment's is that of its recorded micro-batches."""

    def __eq__(self, other: object) -> bool:
        """Whether both have the same timeline."""
        return isinstance(other, Case) and self.file == other.file

    def __hash__(self) -> int:
        """Return the hash of its file."""
        return hash(self.file)

    @cached_property
    def file(self) -> Path:
        """The file of its recording in the cache."""
        return trace_file(self.experiment, self.target, self.prepared, self.num_rows, str(self.identity))

    @cached_property
    def of_any_size(self) -> Path:
        """A file name that cases have in common which differ only in the size of their recorded micro-batches.

        Where the longest sequences are searched, in their length too.
        """
        num_rows = self.experiment.effective_batch_size // self.size
        num_passes = num_rows // self.experiment.world_size
        split = {"micro_batch_size": 1, "accumulation_steps": num_passes, "effective_batch_size": num_rows}
        experiment = Experiment(self.experiment.settings.model_copy(update=split))
        prepared, train = self.prepared, self.prepared.train
        if isinstance(train, OfLength):
            prepared = replace(prepared, train=train.shortest)
        return trace_file(experiment, self.target, prepared, 0, str(self.identity))

    @property
    def size(self) -> int:
        """The micro-batch size."""
        return self.experiment.micro_batch_size

    def of_size(self, size: int) -> "Case":
        """Return the same at another micro-batch size; the whole batch, alive during all micro-batches, stays."""
        settings, passes = self.experiment.settings, self.experiment.accumulation_steps
        num_rows = passes * size * self.experiment.world_size
        changes = {"micro_batch_size": size, "effective_batch_size": num_rows}
        keeps_batch = passes > 1
        return replace(
            self,
            experiment=Experiment(settings.model_copy(update=changes)),
            num_rows=self.num_rows if keeps_batch else num_rows,
        )

    def without(self, techniques: list[Technique]) -> "Case":
        """Return the same without the effect of some techniques."""
        changes = {name: value for each in techniques for name, value in type(each)().model_dump().items()}
        return replace(self, experiment=Experiment(self.experiment.settings.model_copy(update=changes)))
