"""Activation offloading: what the layers save for the backward pass waits in host memory."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, ClassVar

from pydantic import Field

from pipeline.base.contracts import Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of, without_layers
from pipeline.base.units import MIB
from pipeline.techniques._support import offloading

HOOKS_ARE_OUTSIDE = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23)
"""Whether transformers runs a layer's hooks outside of its checkpoint."""


class ActivationOffloading(Technique):
    """Saved tensors above a size are copied to the host in the forward pass, and back before they are needed."""

    stage: ClassVar[Stage] = Stage.RECOMPUTATION

    activation_offloading: bool = False
    """Whether tensors that the layers save for the backward pass wait in host memory, pinned on CUDA."""
    offloading_min_mib: float = Field(default=1.0, ge=0)
    """Smallest saved storage that is offloaded, in MiB."""

    @property
    def mathematics(self) -> Mathematics:
        """The values that come back are those that were saved."""
        return Mathematics.EXACT

    @property
    def smallest_bytes(self) -> float:
        """Bytes from which on a storage is offloaded."""
        return self.offloading_min_mib * MIB

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return both values on CUDA; on a CPU, device and host share their memory."""
        if setting != "activation_offloading":
            return super().values_to_try(setting, hardware)
        return (False, True) if hardware.kind == "cuda" else (False,)

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield why the layers cannot be checkpointed too: older versions run a layer's hooks inside its checkpoint.

        Hooks inside take what the checkpoint would drop, and nothing would be recomputed.
        """
        if not self.activation_offloading:
            return
        checkpointing = settings.checkpointing
        if checkpointing != "none" and not HOOKS_ARE_OUTSIDE:
            yield (
                "activation_offloading=true together with checkpointing needs a transformers that runs a layer's hooks "
                f"outside of its checkpoint, and transformers is {version('transformers')} with "
                f"checkpointing={checkpointing}; "
                "install transformers 5.23, or set checkpointing=offloaded and activation_offloading=false"
            )
        yield from without_layers(self, settings, model)

    def export(self, target: str) -> Exported | None:
        """Return the hooks as they are here, and the call that registers them."""
        if not self.activation_offloading:
            return Exported()
        call = "offload_saved_tensors([model.get_submodule(name) for name in {layers}]"
        return Exported(code=source_of(offloading), prepare=f"{call}, smallest_bytes={self.smallest_bytes:.0f})")

    def apply(self, step: Step) -> Step:
        """Register the hooks on the layers."""
        if self.activation_offloading:
            offloading.offload_saved_tensors(step.trainable.layers, self.smallest_bytes)
        return step
