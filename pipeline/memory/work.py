"""The work of a training run: what its time depends on.

Matrix products count by their floating-point operations, collectives by the bytes that a rank sends to others, and all
other operators by the bytes that they read and write: those are bound by the memory of a device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

ATTENTION = " attention"
"""End of the names of types in which attention is computed in one kernel."""
OTHER_AMOUNTS = ("moved_bytes", "num_kernels", "host_bytes", "num_python_calls")
"""The fields of Work besides the FLOPs and what ranks exchange."""
SENT = "sent by "
"""Beginning of the kinds of what ranks exchange."""


@dataclass(frozen=True)
class Work:
    """What a device has to do."""

    matrix_flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point operations of matrix products, by the type in which they are computed.

    The types are `float32`, `tf32`, `bfloat16`, `float16` and those of 8 bits, as `float8_e4m3fn`. Those of attention
    in one kernel, which has a speed of its own, are apart: `float32 attention`.
    """
    moved_bytes: float = 0
    """Bytes that all other operators read and write."""
    num_kernels: float = 0
    """Operators that launch a kernel."""
    host_bytes: float = 0
    """Bytes copied between the device and the host, and those that operators on a GPU's host read and write."""
    num_python_calls: float = 0
    """Operators that launch a kernel while tensors are saved through hooks, as in a checkpointed layer, and those that
    run under the mode that keeps attention's results: each of the two makes torch call Python."""
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a rank sends to others, by collective and group of ranks: `sent by all_gather of 8`; `of 2 in steps of
    8 among 16` are ranks 0 and 8 of 16.

    Those of a collective for which the operators after it wait, so that it cannot overlap, end in `, waited for`.
    """

    @property
    def flops(self) -> float:
        """Floating-point operations of matrix products and attention, of every type."""
        return sum(self.matrix_flops.values())

    def __add__(self, other: "Work") -> "Work":
        """Return the work of both."""
        return combined(lambda one, another: one + another, self, other)

    def __mul__(self, count: float) -> "Work":
        """Return the work of so many repetitions."""
        return combined(lambda amount: amount * count, self)

    def __truediv__(self, count: float) -> "Work":
        """Return one of so many equal parts."""
        return combined(lambda amount: amount / count, self)

    def shortened(self, share: float, square_share: float) -> "Work":
        """Return about the work of shorter sequences, whose lengths and their squares are these shares of the lengths.

        Calls stay as many. What does not depend on the length, such as sums of gradients, is scaled with the rest.
        """
        shares = {name: square_share if name.endswith(ATTENTION) else share for name in self.matrix_flops}
        return replace(
            self,
            matrix_flops={name: flops * shares[name] for name, flops in self.matrix_flops.items()},
            moved_bytes=self.moved_bytes * share,
            host_bytes=self.host_bytes * share,
        )


def combined(function: Callable[..., float], *works: Work) -> Work:
    """Return the work whose amounts are a function of those of one or several works, kind by kind.

    The function of zeros is zero.
    """
    return Work(
        matrix_flops=_combined_by_name(function, [work.matrix_flops for work in works]),
        sent_bytes=_combined_by_name(function, [work.sent_bytes for work in works]),
        **{kind: function(*(getattr(work, kind) for work in works)) for kind in OTHER_AMOUNTS},
    )


def _combined_by_name(function: Callable[..., float], parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    amounts = {name: function(*(part.get(name, 0) for part in parts)) for name in names}
    return {name: amount for name, amount in amounts.items() if amount}


def work_of(amounts: Mapping[str, int]) -> Work:
    """Return work from its amounts by kind: types of matrix products, collectives, and the other fields of Work."""
    named = {kind: amount for kind, amount in amounts.items() if kind not in OTHER_AMOUNTS and amount}
    return Work(
        matrix_flops={kind: amount for kind, amount in named.items() if not kind.startswith(SENT)},
        sent_bytes={kind: amount for kind, amount in named.items() if kind.startswith(SENT)},
        **{kind: amounts.get(kind, 0) for kind in OTHER_AMOUNTS},
    )
