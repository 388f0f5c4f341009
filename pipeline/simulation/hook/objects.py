"""Lets processes on simulated cards send each other Python objects, as pipeline stages do to agree on shapes.

They go through files, since no card computes what NCCL would send. A rank that is imagined sends them once it runs: a
file says that somebody waits for it, and whoever started this process runs that rank too.
"""

import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Sequence
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

    def rank_of(peer: int | None, group: Any, peer_of_group: int | None) -> int:
        if peer is not None:
            return peer
        if peer_of_group is None:
            raise NotImplementedError("objects of any rank are not received on simulated cards: name the rank")
        return peer_of_group if group is None else distributed.get_global_rank(group, peer_of_group)

    def next_file(of: int, to: object) -> Path:
        route = f"{of}_{to}"
        num_of[route] += 1
        return folder / f"{route}_{num_of[route]}"

    def write(file: Path, objects: Sequence[Any]) -> None:
        part = file.with_name(f"{file.name}.{os.getpid()}")
        part.write_bytes(pickle.dumps(list(objects)))
        part.rename(file)

    def read(file: Path, of: int) -> list[Any]:
        ended = folder / f"{ENDED}{of}"
        if not file.exists():
            (folder / f"{ASKED}{of}").touch()
        while not file.exists():
            if ended.exists() and not file.exists():
                raise RuntimeError(f"rank {of} sent no object: it ended with exit code {ended.read_text()}")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return list(pickle.loads(file.read_bytes()))  # noqa: S301  # of another process of the same command

    def send(
        object_list: Sequence[Any],
        dst: int | None = None,
        group: Any = None,
        _: Any = None,  # the device
        group_dst: int | None = None,
        **__: Any,
    ) -> None:
        write(next_file(distributed.get_rank(), rank_of(dst, group, group_dst)), object_list)

    def receive(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        _: Any = None,  # the device
        group_src: int | None = None,
        **__: Any,
    ) -> int:
        of = rank_of(src, group, group_src)
        object_list[:] = read(next_file(of, distributed.get_rank()), of)
        return of

    def broadcast(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        _: Any = None,  # the device
        group_src: int | None = None,
        **__: Any,
    ) -> None:
        of, ranks = rank_of(src, group, group_src), distributed.get_process_group_ranks(group)
        file = next_file(of, f"all_{zlib.crc32(repr(ranks).encode())}")
        if of == distributed.get_rank():
            write(file, object_list)
        else:
            object_list[:] = read(file, of)

    own = {"send_object_list": send, "recv_object_list": receive, "broadcast_object_list": broadcast}
    for name, function in own.items():
        setattr(distributed, name, function)


if __name__ == "simulated_card_hook":
    send_through_files()
