"""Tensor parallelism: neighbouring ranks divide each layer's matrices, as the model's plan in transformers says."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Exported, Mathematics, Step, Technique
from pipeline.base.units import powers_of_two
from pipeline.base.user_functions import once_of_each
from pipeline.techniques._support.data_parallel import NOT_ON_CPU, without_whole_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Cut:
    """How ranks divide a linear layer or an embedding."""

    axis: int | None
    """Axis of its weight; None: each rank has all of it."""
    takes_part: bool = False
    """Whether a rank has a part of its input alone, as the layer before has left it."""
    gives_part: bool = False
    """Whether a rank keeps its part of the output alone."""
    sums_gradient: bool = False
    """Whether each rank calls it with other heads, so that its gradient is the sum over the ranks."""


WHOLE = Cut(None)
CUTS = {
    "colwise": Cut(0, gives_part=True),
    "colwise_gather_output": Cut(0),
    "colwise_rep": Cut(0),
    "rowwise": Cut(1, takes_part=True),
    "rowwise_split_input": Cut(1),
    "rowwise_rep": Cut(1),
    "embedding_rowwise": Cut(0),
    "replicated_with_grad_allreduce": Cut(None, sums_gradient=True),
}
"""What the words of transformers' plans mean; a module without one is WHOLE."""
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Numbers in a configuration of which each rank takes a part."""


class TensorParallel(Technique):
    """Ranks with neighbouring numbers have a part of each layer's matrices, and take the same sequences."""

    tensor_parallel: PositiveInt = 1
    """Neighbouring processes that divide each layer's matrices and heads, as the model's plan in transformers says, and
    take the same sequences: effective_batch_size is that of world_size / tensor_parallel processes."""

    @property
    def mathematics(self) -> Mathematics:
        """The same sums, of which each rank has a part."""
        return Mathematics.EXACT

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return powers of two up to the GPUs of a machine; on a CPU all ranks share one memory."""
        count = (hardware.count or 1) if hardware.kind == "cuda" else 1
        return powers_of_two(count)

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that fake tensors have no ranks."""
        if self.active and hardware.kind == "cpu":
            yield f"tensor_parallel={self.tensor_parallel}: {NOT_ON_CPU}"

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield which setting needs whole matrices, or another number of ranks, or that the model cannot be divided."""
        if not self.active:
            return
        count = self.tensor_parallel
        rule = f"tensor_parallel={count} leaves each rank a part of every matrix"
        if settings.world_size % count:
            yield (
                f"tensor_parallel must divide world_size, and is {count} with world_size={settings.world_size}; set "
                f"world_size to a multiple of {count}, or tensor_parallel=1"
            )
        if settings.adapter != "none":
            yield (
                f"{rule}, and adapters are of whole ones, and adapter is {settings.adapter}; set adapter=none, or "
                "tensor_parallel=1 and sharding=fsdp"
            )
        yield from without_whole_parameters(settings, rule, "tensor_parallel=1")
        if settings.loss_kernel == "liger":
            yield (
                f"{rule}, the head's too, which Liger's kernel was not tried with, and loss_kernel is liger; set "
                "loss_kernel=chunked, which gathers it, or tensor_parallel=1"
            )
        if not isinstance(settings.reshard_after_forward, bool):
            yield (
                "reshard_after_forward must be true or false with tensor_parallel, since torch makes the groups of a "
                f"number from all ranks, and is {settings.reshard_after_forward}; set it to true or false"
            )
        if reason := _indivisible(model, settings.model, count):
            yield reason

    def export(self, target: str) -> Exported | None:
        """Return torchtitan's own, and nothing for the plain script, which has the whole model in its one process."""
        if target == "torchtitan":
            degree = {"parallelism.tensor_parallel_degree": self.tensor_parallel}
            return Exported(arguments={**degree, "parallelism.enable_sequence_parallel": False})
        return Exported() if target == "pytorch" else None

    def apply(self, step: Step) -> Step:
        """Let each part of the model be divided when it is moved to its device.

        Raises:
            InvalidInputError: this process has no group.

        """
        if not self.active:
            return step
        if not step.ranks.has_group:
            raise InvalidInputError(f"tensor_parallel={self.tensor_parallel} is {NOT_ON_CPU}")
        return replace(step, divide=_Division(step.trainable.module, step.device))


class _Division:
    """Divides parts of a model among ranks, and moves this rank's part to its device.

    Each parameter becomes a DTensor, divided or not, so that the norm of all gradients, the optimizer, FSDP2 and saves
    know which are the same on all ranks. What modules take and give are tensors of this rank.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device, self._cuts = device, _cuts(model)
        self._shared, self._divided = {*_shared(model)}, dict[nn.Parameter, nn.Parameter]()

    def __call__(self, part: nn.Module, mesh: "DeviceMesh") -> None:
        """Divide a part of the model among the ranks of the axis `tensor`, but for what has been divided before."""
        from torch.distributed.tensor import DTensor

        parents = {child: parent for parent in part.modules() for child in parent.children()}
        readers = dict[nn.Module, _Reader]()
        for module in part.modules():
            parameters = {name: one for name, one in module._parameters.items() if one is not None}
            if any(isinstance(one, DTensor) for one in parameters.values()):
                continue
            cut = self._cuts.get(module, WHOLE)
            for name, parameter in parameters.items():
                axis = None if name == "bias" and cut.axis == 1 else cut.axis  # it is added once
                module._parameters[name] = self._own(parameter, axis, mesh["tensor"])
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)
            if parameters and cut.axis is None:
                module.forward = _on_whole(module, cut)
            elif parameters:
                parent = parents.get(module, module)
                if parent not in readers:
                    readers[parent] = _Reader(parent, mesh["tensor"])
                module.forward = _on_part(module, cut, readers[parent])

    def _own(self, parameter: nn.Parameter, axis: int | None, mesh: "DeviceMesh") -> nn.Parameter:
        """Return this rank's part of a parameter, on its device; one that several modules have is divided once."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if parameter in self._divided:
            return self._divided[parameter]
        part, placement = parameter.detach(), Replicate() if axis is None else Shard(axis)
        if axis is not None:
            parts = part.chunk(mesh.size(), axis)
            number = mesh.get_local_rank()
            part = parts[number] if number < len(parts) else part.narrow(axis, 0, 0)
        own = torch.empty(part.shape, dtype=part.dtype, device=self._device).copy_(part)
        divided = DTensor.from_local(
            own, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        made = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        if parameter in self._shared:
            self._divided[parameter] = made
        return made


class _Reader:
    """Makes DTensors of what the modules of a parent read: one of each tensor, so that its gradient is summed once."""

    def __init__(self, parent: nn.Module, mesh: "DeviceMesh") -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Any] | None = None
        parent.register_forward_hook(self._forget, always_call=True)

    def _forget(self, *_: object) -> None:
        self._last = None

    def read(self, given: Tensor, is_part: bool) -> Any:
        """Return a tensor that each rank has, or has a part of, as a DTensor."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if is_part or torch.compiler.is_compiling():
            return DTensor.from_local(given, self._mesh, [Shard(-1) if is_part else Replicate()], run_check=False)
        if self._last is None or self._last[0] is not given:
            self._last = given, DTensor.from_local(given, self._mesh, [Replicate()], run_check=False)
        return self._last[1]


def _on_part(module: nn.Module, cut: Cut, reader: _Reader) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a divided module."""
    from torch.distributed.tensor import Replicate, Shard

    forward, whole, last = module.forward, [Replicate()], [Shard(-1)]

    @wraps(forward)
    def on_part(given: Tensor) -> Tensor:
        taken = reader.read(given, cut.takes_part)
        output = forward(taken.redistribute(placements=last) if cut.axis == 1 else taken)
        local: Tensor = output.redistribute(placements=last if cut.gives_part else whole).to_local()
        return local

    return on_part


def _on_whole(module: nn.Module, cut: Cut) -> Callable[..., Any]:
    """Return the forward pass of a module whose parameters each rank has."""
    from torch.distributed.tensor import Partial, Replicate

    forward, gradient = module.forward, [Partial() if cut.sums_gradient else Replicate()]

    @wraps(forward)
    def on_whole(*args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = {name: one for name, one in module._parameters.items() if one is not None}
        for name, one in parameters.items():
            same = one.redistribute(placements=[Replicate()])  # whose backward pass makes the sum of gradients
            module._parameters[name] = same.to_local(grad_placements=gradient)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    return on_whole


def _cuts(model: nn.Module) -> dict[nn.Module, Cut]:
    """Return how each module is divided of which the plan says something.

    Modules that share a parameter, such as tied embeddings, are left whole if the plan would divide it in two ways.
    """
    plan = _plan(model)
    cuts = {module: CUTS[plan[_starred(name)]] for name, module in model.named_modules() if _starred(name) in plan}
    for parameter in _shared(model):
        owners = [module for module in model.modules() if any(one is parameter for one in module._parameters.values())]
        if len({cuts.get(owner, WHOLE).axis for owner in owners}) > 1:
            cuts = {module: cut for module, cut in cuts.items() if module not in owners}
    return cuts


def _plan(model: nn.Module) -> Mapping[str, str]:
    """Return the words of transformers for modules of a model, by their names with * for numbers of layers."""
    return getattr(model, "tp_plan", None) or {}


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that several modules have."""
    counts = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    return [parameter for parameter, count in counts.items() if count > 1]


@once_of_each
def _indivisible(model: Model, name: str, num_parts: int) -> str | None:
    """Return why a model cannot be divided among so many ranks."""
    module = model.structure(name).module
    rule, plan = "tensor_parallel divides a model as its plan in transformers says (base_model_tp_plan)", _plan(module)
    if not plan:
        return f"{rule}, and {name} has none; set tensor_parallel=1, and sharding=fsdp to divide it"
    if unknown := sorted({*plan.values()} - CUTS.keys()):
        return (
            f"{rule}, and that of {name} has {', '.join(unknown)}, which Fitproof does not know; set "
            "tensor_parallel=1, and sharding=fsdp to divide it"
        )
    sizes = _sizes(module, plan)
    for what, size in sizes.items():
        if size % num_parts:
            common = math.gcd(*sizes.values())
            possible = [str(count) for count in range(1, common + 1) if common % count == 0]
            return (
                f"tensor_parallel must divide the heads and the width of each layer, and is {num_parts}, and {what} "
                f"of {name} is {size}; set it to {' or '.join(possible)}"
            )
    return None


def _sizes(model: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Return what must be divided evenly, by its name: heads, and widths of which ranks hand on parts."""
    widths = {}
    for name, module in model.named_modules():
        cut = CUTS.get(plan.get(_starred(name), ""), WHOLE)
        if cut.takes_part or cut.gives_part:
            weight: Any = module.weight
            widths[f"{'output' if cut.gives_part else 'input'} of {_starred(name)}"] = weight.shape[cut.axis]
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):  # of a model of images and texts
        config = config.get_text_config()
    heads = {head: number for head in HEADS if isinstance(number := getattr(config, head, None), int)}
    return heads | widths if widths else {}
