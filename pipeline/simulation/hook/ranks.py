"""Makes this process one rank of many, all others imagined: torch.distributed's backend "fake" sends nothing.

`set_rank` runs when Python starts, under torchrun too, which gives its processes ranks of its own; the rest runs once
torch is imported.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

RANK = "SIMULATED_CARD_RANK"
"""Variable with this rank and the number of ranks, as 0/64."""
NUM_COMMUNICATORS = "_simulated_card_communicators"
"""Attribute of torch with the number of process groups of several ranks that NCCL would serve in this process."""


def set_rank() -> None:
    """Set the variables that torchrun would, for one rank of many on a machine of its own."""
    rank, _, world_size = os.environ[RANK].partition("/")
    own = {"RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(own, **local)


def use_fake_backend(torch: Any) -> None:
    """Let torch.distributed make process groups of the backend "fake", whichever is asked for."""
    from torch import distributed
    from torch.distributed.utils import _verify_param_shape_across_processes as verify

    init_process_group, new_group = distributed.init_process_group, distributed.new_group
    all_reduce, get_backend = distributed.all_reduce, distributed.get_backend
    two_sided: tuple[Callable[..., Any], ...] = (
        distributed.send,
        distributed.recv,
        distributed.isend,
        distributed.irecv,
    )

    setattr(torch, NUM_COMMUNICATORS, 0)
    stream_of = functools.cache(torch.cuda.Stream)

    asked_for: dict[Any, Any] = {}  # the backend of each process group

    def count(backend: Any, num_ranks: int) -> None:
        is_of_nccl = backend is None or "nccl" in str(backend).lower()
        setattr(torch, NUM_COMMUNICATORS, getattr(torch, NUM_COMMUNICATORS) + (is_of_nccl and num_ranks > 1))

    @functools.wraps(init_process_group)
    def init(backend: Any = None, *_: Any, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        asked_for[distributed.group.WORLD] = distributed.Backend(backend or "undefined")
        count(backend, world_size)

    @functools.wraps(new_group)
    def make(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = new_group(ranks, timeout, backend and "fake", *args, **kwargs)
        if isinstance(group, distributed.ProcessGroup):  # else this rank is no member
            asked_for[group] = asked_for[distributed.group.WORLD] if backend is None else distributed.Backend(backend)
            count(backend, group.size())
        return group

    @functools.wraps(get_backend)
    def backend_of(group: Any = None) -> Any:
        return asked_for.get(distributed.group.WORLD if group is None else group) or get_backend(group)

    @functools.wraps(all_reduce)
    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        return work and _Work(work, tensor, torch.futures.Future)

    def as_nccl(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that sends or receives as NCCL does: on another stream, and its work has the tensor."""

        @functools.wraps(function)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cuda:
                tensor.record_stream(stream_of(tensor.device))
            work = function(tensor, *args, **kwargs)
            return _Work(work, tensor, torch.futures.Future) if isinstance(work, distributed.Work) else work

        return call

    replaced: dict[Callable[..., Any], Callable[..., Any]] = {
        init_process_group: init,
        new_group: make,
        all_reduce: reduce,
        verify: lambda *_, **__: None,
        **{function: as_nccl(function) for function in two_sided},
    }
    for function, own in replaced.items():
        _replace(function, own)
    distributed.get_backend = backend_of  # for programs; torch's own code has it by another module
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel.forward = _with_reduction(torch, parallel.forward)


class _Work:
    """The work of an operation, whose future has the tensor, as NCCL's has: that of the fake backend has nothing."""

    def __init__(self, work: Any, tensor: Any, future: Callable[[], Any]) -> None:
        self._work, self._future = work, future()
        self._future.set_result([tensor])

    def get_future(self) -> Any:
        return self._future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _replace(function: Any, own: Callable[..., Any]) -> None:
    """Replace a function in each module of torch that has it by its name."""
    name = function.__name__
    for owner, module in list(sys.modules.items()):
        if owner.startswith("torch") and vars(module).get(name) is function:
            setattr(module, name, own)


def _with_reduction(torch: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return DistributedDataParallel's forward with a reduction of its own, as the fake backend answers with none."""

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are not its own
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks and torch.is_grad_enabled():
            self.register_comm_hook(None, reduced)
        return forward(self, *args, **kwargs)

    return call


if __name__ == "simulated_card_hook":
    use_fake_backend(sys.modules["torch"])
