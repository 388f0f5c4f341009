"""A technique outside the package: each parameter is updated in the backward pass, when its gradient is complete."""

import inspect
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique


class OptimizerInBackward(Technique):
    """Update each parameter in the backward pass and free its gradient, so that few gradients exist at a time."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER

    optimizer_in_backward: bool = False
    """Update parameters in the backward pass instead of after it."""

    @property
    def mathematics(self) -> Mathematics:
        """The same update of each parameter, only earlier."""
        return Mathematics.EXACT

    def conflict(self, settings: Any) -> str | None:
        """Return which setting needs the gradients of all parameters, or of several backward passes, at once."""
        needed = {"accumulation_steps": 1, "max_grad_norm": None, "gradient_underflow": False}
        wrong = [name for name, value in needed.items() if getattr(settings, name) != value]
        if not self.optimizer_in_backward or not (wrong or settings.precision == "fp16"):
            return None
        if not wrong:
            return "optimizer_in_backward needs gradients without loss scaling, and precision is fp16"
        value = "none" if needed[wrong[0]] is None else needed[wrong[0]]
        return f"optimizer_in_backward needs {wrong[0]}={value}, and it is {getattr(settings, wrong[0])}"

    def export(self, target: str) -> Exported | None:
        """Return the function that changes the optimizer, for plain PyTorch."""
        if target != "pytorch":
            return None
        imports = "from torch import Tensor\nfrom torch.optim import Optimizer\n\n\n"
        code = imports + inspect.getsource(update_in_backward)
        return Exported(code=code, optimizer="update_in_backward({optimizer})")

    def apply(self, step: Step) -> Step:
        """Change whichever optimizer the step makes."""
        if not self.optimizer_in_backward:
            return step
        make_optimizer = step.make_optimizer
        return replace(step, make_optimizer=lambda module: update_in_backward(make_optimizer(module)))


def update_in_backward(optimizer: Optimizer) -> Optimizer:
    """Make an optimizer update each parameter as soon as its gradient is complete; its step() has no effect."""
    update = optimizer.step

    def update_one(parameter: Tensor) -> None:
        update()  # skips parameters without a gradient, which are all others
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(update_one)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer
