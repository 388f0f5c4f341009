"""Makes this process one rank of many, all others imagined: torch's own NCCL backend runs, and NCCL sends nothing.

`set_rank` runs when Python starts, under torchrun too, which gives its processes ranks of its own; the rest runs once
torch is imported.
"""

import functools
import os
import sys
from typing import Any

RANK = "SIMULATED_CARD_RANK"
"""Variable with this rank and the number of ranks, as 0/64."""
NUM_COMMUNICATORS = "_simulated_card_communicators"
"""Attribute of torch with the number of process groups of several ranks that NCCL would serve in this process."""
WITHOUT_NEWS = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables by which NCCL's process groups do not look whether another rank hangs."""


def set_rank() -> None:
    """Set the variables that torchrun would, for one rank of many on a machine of its own."""
    rank, _, world_size = os.environ[RANK].partition("/")
    own = {"RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ.update(own, **local)


def imagine_others(torch: Any) -> None:
    """Let process groups start without the other ranks: on the card NCCL's, on the host those of the backend "fake"."""
    from torch import distributed
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

    init_process_group, new_group = distributed.init_process_group, distributed.new_group
    get_backend, all_gather_object = distributed.get_backend, distributed.all_gather_object
    setattr(torch, NUM_COMMUNICATORS, 0)
    store = _store()  # which process groups do not keep for Python
    asked_for: dict[Any, Any] = {}  # the backend of each process group

    def note(group: Any, backend: Any, num_ranks: int) -> None:
        asked_for[group] = distributed.Backend(backend or "undefined")
        is_of_several = "nccl" in _imagined(backend) and num_ranks > 1
        setattr(torch, NUM_COMMUNICATORS, getattr(torch, NUM_COMMUNICATORS) + is_of_several)

    @functools.wraps(init_process_group)
    def init(backend: Any = None, *_: Any, **__: Any) -> None:  # with a device_id, groups would split a communicator
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ.update(WITHOUT_NEWS)  # a program may have set them
        init_process_group(_imagined(backend), rank=rank, world_size=world_size, store=store)
        note(distributed.group.WORLD, backend, world_size)

    @functools.wraps(new_group)
    def make(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = new_group(ranks, timeout, backend and _imagined(backend), *args, **kwargs)
        if isinstance(group, distributed.ProcessGroup):  # else this rank is no member
            note(group, backend or asked_for[distributed.group.WORLD], group.size())
        return group

    @functools.wraps(get_backend)
    def backend_of(group: Any = None) -> Any:
        return asked_for.get(distributed.group.WORLD if group is None else group) or get_backend(group)

    @functools.wraps(all_gather_object)
    def gather(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:  # the others are taken to have what it has
        objects[:] = [own] * len(objects)

    for function, own in ((init_process_group, init), (new_group, make), (all_gather_object, gather)):
        _replace(function, own)
    distributed.get_backend = backend_of  # for programs; torch's own code has it by another module


def _imagined(backend: Any) -> str:
    """Return the backend by which a process group starts without the other ranks."""
    if backend is None or str(backend) == "undefined":
        return "cpu:fake,cuda:nccl"
    return str(backend).lower().replace("gloo", "fake")


def _store() -> Any:
    """Return a store that has what the other ranks would put into it, such as the identity of a communicator."""
    from torch._C._distributed_c10d import Store

    class Imagined(Store):
        def __init__(self) -> None:
            super().__init__()
            self._kept: dict[str, bytes] = {}

        def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch hands over bytes
            self._kept[key] = value

        def get(self, key: str) -> bytes:
            return self._kept.get(key, bytes(128))  # as many as an identity has

        def add(self, key: str, amount: int) -> int:
            self._kept[key] = str(int(self._kept.get(key, b"0")) + amount).encode()
            return int(self._kept[key])

        def check(self, keys: list[str]) -> bool:
            return all(key in self._kept for key in keys)

        def wait(self, *_: Any) -> None:
            pass

    return Imagined()


def _replace(function: Any, own: Any) -> None:
    """Replace a function in each module of torch that has it by its name."""
    name = function.__name__
    for owner, module in list(sys.modules.items()):
        if owner.startswith("torch") and vars(module).get(name) is function:
            setattr(module, name, own)


if __name__ == "simulated_card_hook":
    imagine_others(sys.modules["torch"])
