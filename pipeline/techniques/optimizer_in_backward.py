"""The optimizer in the backward pass: each parameter is updated, and its gradient freed, as soon as it is complete."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from pipeline.base.contracts import Hardware, Model
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of


class OptimizerInBackward(Technique):
    """Update in the backward pass, so that few gradients exist at a time."""

    stage: ClassVar[Stage] = Stage.UPDATE

    optimizer_in_backward: bool = False
    """Update each parameter in the backward pass, as soon as its gradient is complete; needs max_grad_norm=none."""

    @property
    def mathematics(self) -> Mathematics:
        """The same update of each parameter, only earlier."""
        return Mathematics.EXACT

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return both values, on any hardware."""
        return (False, True)

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield which setting needs the gradients of all parameters, or of several backward passes, at once."""
        if not self.optimizer_in_backward:
            return
        rule = "optimizer_in_backward updates each parameter as soon as its gradient is complete"
        if settings.max_grad_norm is not None:
            yield (
                f"{rule}, before the norm of all gradients is known, and max_grad_norm is {settings.max_grad_norm:g}; "
                "set max_grad_norm=none, which is another training, or optimizer_in_backward=false"
            )
        if settings.world_size > 1:
            yield (
                f"{rule}, before the ranks have added theirs, and world_size is {settings.world_size}; set "
                "world_size=1 or optimizer_in_backward=false"
            )
        if settings.accumulation_steps != 1:
            yield (
                f"{rule}, after one backward pass, and accumulation_steps is {settings.accumulation_steps}; "
                f"set micro_batch_size={settings.effective_batch_size} or optimizer_in_backward=false"
            )
        if settings.precision == "fp16":
            yield (
                f"{rule}, and fp16's loss scaling first looks for infinities in all of them, and precision is fp16; "
                "set precision=bf16 or optimizer_in_backward=false"
            )
        if settings.gradient_underflow:
            yield (
                f"{rule}, and then frees it, and gradient_underflow is true, which reads all gradients; "
                "set gradient_underflow=false or optimizer_in_backward=false"
            )

    def export(self, target: str) -> Exported | None:
        """Return the function that changes the optimizer, for plain PyTorch; other trainers clip or scale gradients."""
        if target != "pytorch":
            return None
        return Exported(code=source_of(update_in_backward), optimizer="update_in_backward({optimizer})")

    def apply(self, step: Step) -> Step:
        """Change whichever optimizer the step makes."""
        if not self.optimizer_in_backward:
            return step
        make_optimizer = step.make_optimizer
        return replace(step, make_optimizer=lambda module: update_in_backward(make_optimizer(module)))


def update_in_backward(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer update each parameter as soon as its gradient is complete; its step() has no effect."""
    update = optimizer.step

    def update_one(group: dict[str, Any], parameter: Tensor) -> None:
        groups, parameters = optimizer.param_groups, group["params"]
        optimizer.param_groups, group["params"] = [group], [parameter]  # all that step() looks at
        try:
            update()
        finally:
            optimizer.param_groups, group["params"] = groups, parameters
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(update_one, group))
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return optimizer
