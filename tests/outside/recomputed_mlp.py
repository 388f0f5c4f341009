"""A technique outside the package: of each layer, the feed-forward part alone is recomputed in the backward pass."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique


class RecomputedMlp(Technique):
    """Checkpoint the feed-forward parts of transformers' layers, which store most, and leave attention as it is."""

    stage: ClassVar[Stage] = Stage.RECOMPUTATION

    recomputed_mlp: bool = False
    """Recompute the feed-forward part of each layer."""

    @property
    def mathematics(self) -> Mathematics:
        """The recomputed activations are equal to the ones that are not stored."""
        return Mathematics.EXACT

    def refusals(self, settings: Any, hardware: Any, model: Any) -> Iterator[str]:
        """Yield that layers which are recomputed whole would recompute these parts twice."""
        if self.recomputed_mlp and settings.checkpointing != "none":
            yield f"recomputed_mlp needs checkpointing=none, and it is {settings.checkpointing}"

    def export(self, target: str) -> Exported | None:
        """Return the function that changes the model, for plain PyTorch."""
        if target != "pytorch":
            return None
        imports = (
            "from functools import partial\n\nfrom torch import nn\nfrom torch.utils.checkpoint import checkpoint\n\n\n"
        )
        return Exported(code=imports + inspect.getsource(recompute_mlps), prepare="recompute_mlps(model)")

    def apply(self, step: Step) -> Step:
        """Change the model in place."""
        if self.recomputed_mlp:
            recompute_mlps(step.trainable.module)
        return step


def recompute_mlps(model: nn.Module) -> None:
    """Checkpoint every part of a model that is called mlp."""
    for name, part in model.named_modules():
        if name.endswith(".mlp"):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
