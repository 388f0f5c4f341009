"""Sharding: what each rank keeps of parameters, gradients and optimizer state: all of them, or its part (FSDP2)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal
from unittest.mock import patch

import torch
from pydantic import BeforeValidator, PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Hardware, Model
from pipeline.base.errors import InvalidInputError
from pipeline.base.ranks import data_ranks_in_settings, num_data_ranks
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, without_idle
from pipeline.base.units import powers_of_two
from pipeline.techniques._support.data_parallel import (
    NOT_ON_CPU,
    Accumulating,
    LossModule,
    data_parallel,
    mesh_of,
    parts_data_parallel,
    without_whole_parameters,
)

IN_ACCELERATE = (
    "Accelerate, which makes the shards, sums gradients in the type of mixed precision, where float32 was measured; of "
    "several passes it sums them after the last alone, as with sharded_accumulation=false."
)


class Sharding(Technique):
    """Every rank has the whole model (DistributedDataParallel), or a part of each parameter (FSDP2, fully_shard)."""

    stage: ClassVar[Stage] = Stage.RANKS

    sharding: Annotated[Literal["none", "fsdp"], BeforeValidator(lambda value: "none" if value == "ddp" else value)] = (
        "none"
    )
    """none (or ddp): each of world_size processes has all parameters; fsdp: a part of each, gathered layer by layer."""
    sharding_replicas: PositiveInt = 1
    """With fsdp, copies of the model, each divided among world_size / sharding_replicas neighbouring ranks (HSDP)."""
    reshard_after_forward: PositiveInt | bool = True
    """With fsdp, whether a layer's gathered parameters are freed after its forward pass, and gathered again; a number:
    each keeps a part of them, divided among so many ranks."""
    sharded_accumulation: bool = True
    """With fsdp, whether gradients are summed after each pass: a rank keeps a part of them; false: after the last."""
    sharded_offloading: bool = False
    """With fsdp, whether a rank's parts of parameters, gradients and optimizer state stay in host memory, where the
    optimizer updates them: a layer's parameters are copied to the device before they are gathered."""

    @property
    def mathematics(self) -> Mathematics:
        """The same sums over the ranks, in float32."""
        return Mathematics.EXACT

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return both ways, or powers of two, where there are several GPUs; on a CPU all ranks share one memory."""
        count = hardware.count or 1
        values = {
            "sharding": ("none", "fsdp"),
            "sharded_offloading": (False, True),
            "sharding_replicas": powers_of_two(max(1, count - 1)),
        }.get(setting, (True, False))
        return values if hardware.kind == "cuda" and count > 1 else values[:1]

    @property
    def untimed(self) -> tuple[str, ...]:
        """The parts on the host: how fast it updates them, beside other ranks, is assumed."""
        return ("sharded_offloading",) if self.sharded_offloading else ()

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield that fake tensors have no ranks, or what is not known of a host."""
        if self.sharding == "fsdp" and hardware.kind == "cpu":
            yield f"sharding=fsdp: {NOT_ON_CPU}"
        elif self.sharded_offloading:
            yield _NOT_OF_HOST

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield which setting needs whole parameters, several ranks or passes, or FSDP2 itself."""
        if self.sharding == "none":
            yield from without_idle(self)
            return
        rule = "sharding=fsdp leaves each rank a part of every parameter"
        num_ranks = num_data_ranks(settings.world_size, settings.tensor_parallel)
        if num_ranks == 1 and settings.tensor_parallel > 1:
            yield (
                "sharding=fsdp divides what is left by tensor_parallel among the processes with other sequences, and "
                f"tensor_parallel is {settings.tensor_parallel} and world_size {settings.world_size}; set world_size "
                f"to a multiple of tensor_parallel, {2 * settings.tensor_parallel} or more, or sharding=none"
            )
        if num_ranks == 1:
            yield (
                "sharding=fsdp divides the model among the processes that train together, and world_size is 1; set "
                "world_size=2 or more, or sharding=none"
            )
        if settings.adapter == "qlora":
            yield (
                f"{rule}, and 4-bit weights can only be read whole, and adapter is qlora; set adapter=lora or "
                "sharding=none"
            )
        yield from without_whole_parameters(settings, rule, "sharding=none")
        if settings.activation_offloading:
            yield (
                "activation_offloading=true would move the parameters that sharding=fsdp has gathered, which a layer "
                "saves too; set checkpointing=offloaded and activation_offloading=false, or sharding=none"
            )
        yield from self._indivisible(num_ranks, data_ranks_in_settings(settings.tensor_parallel))
        if self.sharded_offloading:
            yield from _not_offloaded(settings)
        if not self.sharded_accumulation and settings.accumulation_steps == 1:
            yield (
                "sharded_accumulation=false sums gradients after the last of several passes, and accumulation_steps is "
                "1; set sharded_accumulation=true, or a smaller micro_batch_size"
            )

    def _indivisible(self, num_ranks: int, name: str) -> Iterator[str]:
        """Yield that the ranks cannot be divided into so many copies, or those of a copy into so many parts."""
        replicas, reshards = self.sharding_replicas, self.reshard_after_forward
        possible = [count for count in range(1, num_ranks // 2 + 1) if num_ranks % count == 0]
        if replicas not in possible:
            yield (
                f"sharding_replicas must divide {name} and leave each copy two ranks or more, and is {replicas} "
                f"with {name}={num_ranks}; set it to {' or '.join(map(str, possible))}, or sharding=none, with "
                "which each rank has a copy"
            )
        num_parts = num_ranks // replicas
        numbers = [count for count in range(2, num_parts) if num_parts % count == 0]
        if not isinstance(reshards, bool) and reshards not in numbers:
            yield (
                "reshard_after_forward is true, false or a divisor of the ranks that a copy is divided among, other "
                f"than 1 and all, and is {reshards} with {num_parts} ranks; set it to "
                f"{' or '.join(['true', 'false', *map(str, numbers)])}"
            )

    def export(self, target: str) -> Exported | None:
        """Return FSDP2 of the other frameworks, and DeepSpeed's stage of ZeRO that is most like it."""
        if target == "torchtitan":
            return self._in_torchtitan()
        if target != "pytorch" and (self.sharding_replicas > 1 or not isinstance(self.reshard_after_forward, bool)):
            return None
        by_layer = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": self.reshard_after_forward}
        if target == "pytorch":
            return Exported(notes=("It has the whole model in its one process, and so not the memory of a rank.",))
        if self.sharded_offloading:
            by_layer["cpu_offload" if target in ("training_arguments", "trl") else "offload_params"] = True
        if target == "deepspeed":
            if self.sharded_offloading:
                return None
            stage = 3 if self.reshard_after_forward else 2
            note = (
                f"ZeRO's stage {stage} divides what sharding=fsdp does, by buckets of its own: the losses are the "
                "measured ones but for the order of sums, memory and time are not."
            )
            arguments: dict[str, Any] = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
            return Exported(arguments=arguments, notes=(note,))
        if target == "accelerate":
            arguments = {"fsdp_config": {"fsdp_version": 2, **{f"fsdp_{name}": by_layer[name] for name in by_layer}}}
        elif target in ("training_arguments", "trl"):
            arguments = {"fsdp": True, "fsdp_config": {"version": 2, **by_layer}}
        elif target == "axolotl":
            arguments = {"fsdp_version": 2, "fsdp_config": by_layer}
        else:
            return None
        return Exported(arguments=arguments, notes=(IN_ACCELERATE,))

    def _in_torchtitan(self) -> Exported | None:
        if not isinstance(self.reshard_after_forward, bool):
            return None
        arguments = {
            "parallelism.data_parallel_replicate_degree": self.sharding_replicas,
            "parallelism.data_parallel_shard_degree": -1,  # all other ranks
            "parallelism.fsdp_reshard_after_forward": "always" if self.reshard_after_forward else "never",
            "training.enable_cpu_offload": self.sharded_offloading,
        }
        return Exported(arguments=arguments)

    def apply(self, step: Step) -> Step:
        """Move the whole model to the device of each rank, or its part alone: no device has more of it at any time.

        A module quantizes 4-bit weights when it is moved, to a CPU too.
        """
        if self.sharding == "fsdp":
            return _fully_sharded(step, self)
        if step.ranks.tensor_parallel > 1:
            return parts_data_parallel(step)
        step.trainable.module.to(step.device)
        return step if step.ranks.size == 1 else data_parallel(step)


_NOT_OF_HOST = (
    "sharded_offloading=true: host memory is neither predicted nor part of a budget; in times, copies overlap with "
    "nothing, and the host's processor is assumed to read and write as many bytes a second for each rank as a copy "
    "to its device moves"
)


def _fully_sharded(step: Step, sharding: Sharding) -> Step:
    """Return a step whose layers are gathered one at a time (FSDP2), and all other parameters for the whole pass.

    Parameters are gathered in the type of autocast, gradients are summed in float32, over several copies of the model
    in the last pass alone. The sum, not FSDP2's mean, is the gradient of the window's loss: each rank divides its
    losses by all ranks' targets. Parts on the host are in pinned memory where the device is a GPU.
    """
    if not step.ranks.has_group:
        raise InvalidInputError(f"sharding=fsdp is {NOT_ON_CPU}")
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    ranks, replicas = step.ranks, sharding.sharding_replicas
    num_parts = ranks.num_data_ranks // replicas
    whole_mesh = mesh_of(step, replicate=replicas, shard=num_parts, tensor=ranks.tensor_parallel)
    mesh = whole_mesh["shard"] if replicas == 1 else whole_mesh["replicate", "shard"]
    policy = MixedPrecisionPolicy(param_dtype=_autocast_dtype(step), reduce_dtype=torch.float32)
    keeps = CPUOffloadPolicy(pin_memory=step.device.type == "cuda") if sharding.sharded_offloading else OffloadPolicy()
    with nullcontext() if isinstance(sharding.reshard_after_forward, bool) else _one_mesh_after_forward():
        for layer in step.trainable.layers:
            step.divide(layer, whole_mesh)
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=sharding.reshard_after_forward,
                mp_policy=policy,
                offload_policy=keeps,
            )
    step.divide(step.trainable.module, whole_mesh)
    loss = LossModule(step.trainable)
    as_they_are = replace(policy, cast_forward_inputs=False)  # a batch may have targets in float32
    root = fully_shard(loss, mesh=mesh, reshard_after_forward=False, mp_policy=as_they_are, offload_policy=keeps)
    for part in loss.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # Gloo has no multiplication before its sum

    accumulation = Accumulating()

    def loss_of(_: nn.Module, batch: Batch, num_targets: int) -> Tensor:
        root.set_requires_gradient_sync(sharding.sharded_accumulation or not accumulation.is_entered)
        root.set_requires_all_reduce(not accumulation.is_entered)
        computed: Tensor = loss(batch, num_targets)
        return computed

    return replace(step, trainable=replace(step.trainable, loss=loss_of), accumulation_context=accumulation)


@contextmanager
def _one_mesh_after_forward() -> Iterator[None]:
    """Let all layers share the groups that keep parts of their parameters after the forward pass.

    FSDP2 makes groups for each layer if `reshard_after_forward` is a number, and NCCL a communicator of each group.
    """
    import torch.distributed.fsdp._fully_shard._fully_shard as fsdp

    name = "_get_post_forward_mesh_info"
    make, made = getattr(fsdp, name), list[Any]()

    def once(*args: Any) -> Any:
        if not made:
            made.append(make(*args))
        return made[0]

    with patch.object(fsdp, name, once):
        yield


def _autocast_dtype(step: Step) -> torch.dtype | None:
    """Return the type in which a forward pass computes matrix products; None if it is that of the parameters."""
    kind = step.device.type
    with step.forward_context():
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _not_offloaded(settings: Any) -> Iterator[str]:
    """Yield what the host's parts cannot be updated with."""
    rule = "sharded_offloading=true updates parameters in host memory"
    if settings.optimizer != "adamw":
        yield (
            f"{rule}, where Muon would multiply whole matrices, and optimizer is {settings.optimizer}; set "
            "optimizer=adamw or sharded_offloading=false"
        )
    if settings.precision == "fp16":
        yield (
            f"{rule}, and fp16's loss scale is on the device, which the host would have to wait for, and precision "
            "is fp16; set precision=bf16 or sharded_offloading=false"
        )
