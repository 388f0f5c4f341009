"""Expandable segments: CUDA's caching allocator grows the segments that it has instead of adding new ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.base.contracts import Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Technique
from pipeline.memory.allocator_options import VARIABLES, are_segments_decided, with_expandable_segments


class ExpandableSegments(Technique):
    """One growing segment for all large tensors, so that less memory is reserved beside what is allocated."""

    expandable_segments: bool = False
    """Configure the caching allocator of the run's process with expandable_segments:True; false: as the user did."""

    @property
    def mathematics(self) -> Mathematics:
        """The same operators on the same numbers, at other addresses."""
        return Mathematics.EXACT

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[bool, ...]:
        """Return both values on CUDA, unless the user's environment has decided."""
        return (False, True) if hardware.kind == "cuda" and not are_segments_decided() else (False,)

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that a device without CUDA has no caching allocator."""
        if self.expandable_segments and hardware.kind != "cuda":
            yield (
                f"expandable_segments=true configures CUDA's caching allocator, and the device is {hardware.kind}; "
                "set expandable_segments=false"
            )

    def environment(self) -> Mapping[str, str]:
        """Return the allocator's options: those of the user's environment, and this one."""
        return with_expandable_segments(new=VARIABLES[0]) if self.expandable_segments else {}

    def export(self, target: str) -> Exported:
        """Return the environment variable as a note, for any framework."""
        [(name, value)] = self.environment().items()
        return Exported(notes=(f"Set {name}={value} in the environment of the process, before it imports torch.",))
