"""Lets processes on simulated cards send each other Python objects, as pipeline stages do to agree on shapes.

They go through files, since no card computes what NCCL would send. A rank that is imagined sends them once it runs: a
file says that somebody waits for it, and whoever started this process runs that rank too.
"""

import functools
import inspect
import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "SIMULATED_CARD_OBJECTS"
"""Variable with the folder of the files."""
ASKED, ENDED = "asked_of_", "ended_"
"""A file of these names and a rank: somebody waits for what it sends; it has ended, with the exit code in the file."""
SECONDS_BETWEEN_LOOKS = 0.02


def send_through_files() -> None:
    """Replace torch.distributed's functions by which one rank sends objects to another one, or to all of a group."""
    from torch import distributed

    folder = Path(os.environ[FOLDER])
    num_of: Counter[str] = Counter()

    def next_file(of: int, to: object) -> Path:
        route = f"{of}_{to}"
        num_of[route] += 1
        return folder / f"{route}_{num_of[route]}"

    def write(file: Path, objects: list[Any]) -> None:
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_bytes(pickle.dumps(objects))
        part.rename(file)

    def read(file: Path, of: int) -> list[Any]:
        ended = folder / f"{ENDED}{of}"
        if not file.exists():
            (folder / f"{ASKED}{of}").touch()
        while not file.exists():
            if ended.exists() and not file.exists():
                raise RuntimeError(f"rank {of} sent no object: it ended with exit code {ended.read_text()}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        objects: list[Any] = pickle.loads(file.read_bytes())  # noqa: S301  # of another process of the same command
        return objects

    def send(objects: list[Any], to: int, _: Any) -> None:
        write(next_file(distributed.get_rank(), to), objects)

    def receive(objects: list[Any], of: int, _: Any) -> int:
        objects[:] = read(next_file(of, distributed.get_rank()), of)
        return of

    def broadcast(objects: list[Any], of: int, group: Any) -> None:
        ranks = distributed.get_process_group_ranks(group)
        file = next_file(of, f"all_{zlib.crc32(repr(ranks).encode())}")
        if of == distributed.get_rank():
            write(file, objects)
        else:
            objects[:] = read(file, of)

    def rank_of(given: Mapping[str, Any], peer: str) -> int:
        rank, group, rank_in_group = given.get(peer), given.get("group"), given.get(f"group_{peer}")
        if rank is not None:
            return int(rank)
        if rank_in_group is None:
            raise NotImplementedError("objects of any rank are not received on simulated cards: name the rank")
        return int(rank_in_group) if group is None else distributed.get_global_rank(group, rank_in_group)

    def replace(name: str, peer: str, act: Callable[[list[Any], int, Any], Any]) -> None:
        """Let a function of torch.distributed, whose argument `peer` names the other rank, do this instead."""
        function = getattr(distributed, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            return act(given["object_list"], rank_of(given, peer), given.get("group"))

        setattr(distributed, name, call)

    replace("send_object_list", "dst", send)
    replace("recv_object_list", "src", receive)
    replace("broadcast_object_list", "src", broadcast)


if __name__ == "simulated_card_hook":
    send_through_files()
