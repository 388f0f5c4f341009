"""The reference of preference training: the model as it was, which its answers are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Hardware, Model
from pipeline.base.technique import Mathematics, Stage, Step, Technique


class Reference(Technique):
    """A frozen copy of the model, as it was, gives the log-probabilities that task=dpo compares its own with.

    With adapters the model without them is the reference, and there is no copy.
    """

    stage: ClassVar[Stage] = Stage.LOSS

    reference: Literal["frozen", "none"] = "frozen"
    """Of task=dpo: frozen: a copy of the weights that is not trained, or the model without its adapters; none: answers
    are not compared, and the memory is that of log-probabilities that were computed before."""

    @property
    def mathematics(self) -> Mathematics:
        """Without a reference it is another loss."""
        return Mathematics.DIFFERENT if self.active else Mathematics.EXACT

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that nothing but DPO has a reference, or that a copy would not be divided among ranks."""
        if self.active and settings.task != "dpo":
            yield (
                f"reference=none is a setting of task=dpo, and task is {settings.task or 'none'}; set reference=frozen"
            )
        has_copy = settings.task == "dpo" and not self.active and settings.adapter == "none"
        if has_copy and settings.sharding != "none":
            yield (
                f"sharding={settings.sharding} shards the model that is trained, and not the frozen copy of task=dpo; "
                "set adapter=lora, which needs no copy, reference=none, or sharding=none"
            )
        if has_copy and settings.tensor_parallel > 1:
            yield (
                f"tensor_parallel={settings.tensor_parallel} divides the model that is trained, and not the frozen "
                "copy of task=dpo; set reference=none, or tensor_parallel=1"
            )

    def apply(self, step: Step) -> Step:
        """Compare with a reference, if the loss is one that does."""
        trainable = step.trainable
        scores, module = trainable.scores, trainable.module
        if scores is None or self.active:
            return step
        adapted = [part for part in module.modules() if hasattr(part, "base_layer")]
        reference = module if adapted else _frozen_copy(module, step.device)

        def loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
            with torch.no_grad(), _without(adapted, reference):
                before = scores(reference, batch)
            return trainable.loss(module, {**batch, "reference": before}, num_targets)

        return replace(step, trainable=replace(trainable, loss=loss))


def _frozen_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy on `device` of a model that is not trained, without dropout."""
    copies: dict[int, Any] = {id(one): nn.Parameter(_copy(one, device), False) for one in module.parameters()}
    copies |= {id(one): _copy(one, device) for one in module.buffers()}
    return deepcopy(module, copies).eval()


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy that an operator makes, so that a recorder of operators sees it."""
    return tensor.detach().to(device, copy=True)


@contextmanager
def _without(adapted: list[Any], module: nn.Module) -> Iterator[None]:
    """Switch off the adapters and the dropout of a model inside this context, if it has adapters."""
    is_training = module.training
    for part in adapted:
        part.enable_adapters(False)
    module.eval()
    try:
        yield
    finally:
        module.train(is_training)
        for part in adapted:
            part.enable_adapters(True)
