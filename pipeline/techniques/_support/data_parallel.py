"""Data parallelism: torch's DistributedDataParallel around the loss of a step, for all ranks of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pipeline.base.contracts import Batch, Trainable
from pipeline.base.ranks import Ranks
from pipeline.base.technique import Step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


NEEDS_WHOLE_PARAMETERS = {
    "adamw_8bit": "bitsandbytes' 8-bit AdamW knows no parts (DTensor)",
    "adafactor": "torch's Adafactor computes in place on norms of parts, which DTensor refuses",
    "sgd": "torch's fused SGD knows no parts (DTensor)",
}
"""Optimizers that cannot update a part of a parameter as they would update all of it, and why."""
EXACT = 2**52
"""Integers below it are numbers of 64 bits without rounding."""
NOT_ON_CPU = (
    "not predicted on a CPU: fake tensors have no processes that exchange parts; a simulated card has (--gpu), and a "
    "run measures it"
)
"""Why the memory of parts is not predicted there."""


def without_whole_parameters(settings: Any, rule: str, otherwise: str) -> Iterator[str]:
    """Yield that the optimizer needs whole parameters, where a `rule` leaves parts of them; `otherwise` is a remedy."""
    reason = NEEDS_WHOLE_PARAMETERS.get(settings.optimizer.removeprefix("paged_"))
    if reason is not None:
        yield (
            f"{rule}, and {reason}, and optimizer is {settings.optimizer}; set optimizer=adamw or muon, or {otherwise}"
        )


class LossModule(nn.Module):
    """The loss of a model as a module, so that whatever it calls of the model is inside the module's forward pass."""

    def __init__(self, trainable: Trainable) -> None:
        super().__init__()
        self.model, self._loss = trainable.module, trainable.loss

    def forward(self, batch: Batch, num_targets: int) -> Tensor:
        """Return the loss of a micro-batch."""
        return self._loss(self.model, batch, num_targets)


class Accumulating:
    """The context of the forward passes of an optimizer step but the last one; it tells whether it is entered."""

    is_entered = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enter it."""
        self.is_entered = True
        try:
            yield
        finally:
            self.is_entered = False


def data_parallel(step: Step) -> Step:
    """Return a step whose gradients are summed over all ranks in the last backward pass of an optimizer step.

    The sum, not DDP's mean, is the gradient of the window's loss: each rank divides its losses by all ranks' targets.
    Gradients are views of DDP's buckets from the start and stay there: freed ones would become a second copy while they
    accumulate. DDP makes its buckets anew after the first update, in the order of the gradients. It sends no parameters
    at the start: each rank has made the same from the seed, or has read them from the same checkpoint.
    """
    _share_a_zero(step.trainable.module)
    arguments: dict[str, bool] = {"gradient_as_bucket_view": True, "init_sync": False, _syncs_buffers(): False}
    loss = DistributedDataParallel(LossModule(step.trainable), **arguments)  # type: ignore[arg-type]
    begun, updates = list[dist.Work](), count()

    def sum_over_ranks(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        step.ranks.entered()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None  # it is asynchronous
        begun.append(work)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed

    loss.register_comm_hook(None, sum_over_ranks)

    def zero_gradients(optimizer: Optimizer) -> None:
        for work in begun:  # NCCL holds a bucket until its sum is waited for, or a thread of its own sees its end
            work.wait()
        begun.clear()
        if next(updates) == 0:
            _share_a_zero(step.trainable.module)
        else:
            optimizer.zero_grad(set_to_none=False)

    def loss_of(_: nn.Module, batch: Batch, num_targets: int) -> Tensor:
        computed: Tensor = (loss if torch.is_grad_enabled() else loss.module)(batch, num_targets)
        return computed

    return replace(
        step,
        trainable=replace(step.trainable, loss=loss_of),
        accumulation_context=loss.no_sync,
        zero_gradients=zero_gradients,
    )


def mesh_of(step: Step, **sizes: int) -> "DeviceMesh":
    """Return all ranks as a mesh with axes of these names and sizes, without those of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    axes = {name: size for name, size in sizes.items() if size > 1}
    return init_device_mesh(step.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def parts_data_parallel(step: Step) -> Step:
    """Return a step whose matrices are divided, and whose gradients are summed over the ranks with the same parts.

    They are summed in the last backward pass of an optimizer step, each as soon as it is there: DistributedDataParallel
    knows no parts (DTensor).
    """
    ranks, accumulation, is_last = step.ranks, Accumulating(), False

    def sum_gradient(parameter: Tensor) -> None:
        if is_last:
            gradient: Any = parameter.grad
            dist.all_reduce(gradient.to_local(), group=group)

    mesh = mesh_of(step, data=ranks.num_data_ranks, tensor=ranks.tensor_parallel)
    step.divide(step.trainable.module, mesh)
    if ranks.num_data_ranks > 1:
        group = mesh["data"].get_group()
        for parameter in step.trainable.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sum_gradient)  # type: ignore[no-untyped-call]

    def loss_of(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
        nonlocal is_last
        is_last = not accumulation.is_entered
        return step.trainable.loss(module, batch, num_targets)

    return replace(step, trainable=replace(step.trainable, loss=loss_of), accumulation_context=accumulation)


def refuse_other_weights(module: nn.Module, ranks: Ranks) -> None:
    """Raise RuntimeError if the ranks have made different parameters, since nothing sends one's to the others."""
    if ranks.size == 1 or ranks.are_imagined:  # whose weights have no values
        return
    sums = [_sum_of_bits(parameter.detach()) for parameter in module.parameters()]
    own = [*sums, *(-value for value in sums)]  # the largest negative value is that of the smallest sum
    if ranks.largest(own) != own:
        raise RuntimeError(
            "all ranks must begin with the same weights, and theirs differ; draw them from torch's generator, which "
            "`seed` sets, or read them from a checkpoint"
        )


def _sum_of_bits(tensor: Tensor) -> float:
    """Return the sum of a tensor's numbers read as integers, which is the same in any order and on any processor."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return float(int(tensor.view(integers).sum(dtype=torch.int64)) % EXACT)


def _share_a_zero(module: nn.Module) -> None:
    """Make all gradients of a type views of one zero: DDP replaces them by views of new buckets, with their value."""
    zeros: dict[torch.dtype, Tensor] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            zero = zeros.setdefault(parameter.dtype, torch.zeros((), dtype=parameter.dtype, device=parameter.device))
            parameter.grad = zero.expand_as(parameter)


def _syncs_buffers() -> str:
    """Return the name of the argument that makes rank 0's buffers those of all ranks before each forward pass."""
    newer, older = "forward_sync_buffers", "broadcast_buffers"
    return newer if newer in signature(DistributedDataParallel).parameters else older
