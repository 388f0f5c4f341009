"""Expandable segments: CUDA's caching allocator grows the segments that it has instead of adding new ones."""

import os
from collections.abc import Mapping

from pipeline.base.contracts import Hardware
from pipeline.base.technique import Exported, Mathematics, Technique

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables of the allocator's options; torch reads the first one that is set."""
OPTION = "expandable_segments"


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
        is_open = hardware.kind == "cuda" and not any(OPTION in os.environ.get(name, "") for name in VARIABLES)
        return (False, True) if is_open else (False,)

    def unsupported(self, hardware: Hardware) -> str | None:
        """Return that a device without CUDA has no caching allocator."""
        if self.expandable_segments and hardware.kind != "cuda":
            return (
                f"expandable_segments=true configures CUDA's caching allocator, and the device is {hardware.kind}; "
                "set expandable_segments=false"
            )
        return None

    def environment(self) -> Mapping[str, str]:
        """Return the allocator's options: those of the user's environment, and this one."""
        if not self.expandable_segments:
            return {}
        variable = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
        given = [option.strip() for option in os.environ.get(variable, "").split(",") if option.strip()]
        others = [option for option in given if option.partition(":")[0].strip() != OPTION]
        return {variable: ",".join([*others, f"{OPTION}:True"])}

    def export(self, target: str) -> Exported:
        """Return the environment variable as a note, for any framework."""
        [(name, value)] = self.environment().items()
        return Exported(notes=(f"Set {name}={value} in the environment of the process, before it imports torch.",))
