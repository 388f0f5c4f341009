"""The machines on which a training runs: torchrun starts `fitproof main` once on each, and has a store for all."""

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.base.errors import InvalidInputError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SECONDS_FOR_OTHERS = 300.0
"""How long a machine waits for what the others say."""
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Machine:
    """One of the machines on which torchrun has started this command."""

    number: int
    """Counted from 0; the first one logs the training."""
    count: int

    @property
    def is_alone(self) -> bool:
        """Whether there is no other machine."""
        return self.count == 1

    def ask_all(self, question: str, own_answer: str) -> list[str]:
        """Return what each machine answers to a question that every one asks, and answers, once.

        One that is alone asks itself.

        Raises:
            InvalidInputError: a machine has not answered for minutes.

        """
        if self.is_alone:
            return [own_answer]
        from torch.distributed import DistNetworkError
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", rank=self.number, world_size=self.count))
        answers = self._exchange(store, question, own_answer)
        # The store ends with the machine that has it, so each stays until all have read; who is cut off has read too.
        with contextlib.suppress(DistNetworkError):
            self._exchange(store, f"reading of the {question}", "done")
        return answers

    def _exchange(self, store: "Store", question: str, own_answer: str) -> list[str]:
        store.set(f"{question}/{self.number}", own_answer)
        answers = [f"{question}/{number}" for number in range(self.count)]
        end = time.monotonic() + SECONDS_FOR_OTHERS
        while not store.check(answers):
            if time.monotonic() > end:
                silent = [str(number) for number, answer in enumerate(answers) if not store.check([answer])]
                raise InvalidInputError(
                    f"all machines of a training must run the same command, and machine {', '.join(silent)} has not "
                    f"said its {question} for {SECONDS_FOR_OTHERS:g} s; see what it printed"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return [store.get(answer).decode() for answer in answers]


def this_machine() -> Machine:
    """Return this machine, as torchrun tells its number; without torchrun it is alone."""
    variables = os.environ
    if "TORCHELASTIC_RUN_ID" not in variables:
        return Machine(0, 1)
    return Machine(int(variables["GROUP_RANK"]), int(variables["GROUP_WORLD_SIZE"]))


def check_started_by_torchrun(entry: str) -> None:
    """Check how torchrun, if it has, started an entry point.

    Raises:
        InvalidInputError: it started several on one machine, or another entry point than `main` on several.

    """
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if count > 1:
        raise InvalidInputError(
            f"torchrun starts fitproof once on each machine, which starts the ranks itself, and started {count} here; "
            "set --nproc-per-node 1, and --world_size to the number of ranks"
        )
    if entry != "main" and not this_machine().is_alone:
        raise InvalidInputError(
            f"only `fitproof main` trains on several machines, and this is {entry}; run it on one machine, and its "
            "best.yaml on all: fitproof main --config best.yaml"
        )
