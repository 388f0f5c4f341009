"""What a few configurations need tells what the others of a space are expected to.

The logarithm of a step's time is a sum over the values of the dimensions, and so is the peak, in proportion to the
micro-batch size. N counts configurations, F features.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.config.space import MICRO_BATCH, Choice, Value

BUSY_SIZE = 8
"""Sequences of a micro-batch that keep a device busy: at most so many are in the first configurations."""
NUM_FRUITLESS = 20
"""Configurations, the last of them expected to be the leanest, after which only those beside the leanest follow."""
RIDGE = 1e-3
Vector = NDArray[np.float64]


class Expectation:
    """What is expected of the configurations of a space."""

    def __init__(self, choices: Sequence[Choice], sizes: Sequence[int]) -> None:
        """Take the configurations and their micro-batch sizes, which are no dimension where there is but one."""
        self.choices, self.sizes = choices, sizes

    def first(self) -> list[int]:
        """Return one configuration, and those that differ from it in one value: the largest, and a small micro-batch.

        Its micro-batch is one that keeps a device busy: with a smaller one the host sets the time, whatever a value
        saves on the device.
        """
        sizes = sorted({*self.sizes})
        busy = max((size for size in sizes if size <= BUSY_SIZE), default=sizes[0])
        first = self.choices[self.sizes.index(busy)]
        small = sizes[sizes.index(busy) // 2]

        def likest(name: str, value: Value) -> int:
            wanted = {**first, name: value}
            own = (number for number, choice in enumerate(self.choices) if choice.get(name) == value)
            return max(own, key=lambda number: sum(self.choices[number][each] == wanted[each] for each in first))

        _, of_columns = indicators(self.choices)
        likes = [likest(name, value) for name, value in of_columns]
        likes += [likest(MICRO_BATCH, size) for size in (small, sizes[-1]) if MICRO_BATCH in first]
        return list(dict.fromkeys([self.sizes.index(busy), *likes]))

    def beside(self, number: int) -> set[int]:
        """Return the configurations that differ from one in one value."""
        own = self.choices[number].items()
        num_other = [sum(other[name] != value for name, value in own) for other in self.choices]
        return {other for other, num in enumerate(num_other) if num == 1}

    def may_be_leanest(self, peaks: Mapping[int, float], accumulates: Sequence[bool], num_tried: int) -> set[int]:
        """Return those that may need the least memory: all, until NUM_FRUITLESS of them were tried.

        Then those that differ in one value from the leanest with accumulation, or from that without: what makes the one
        lean does not the other, since without accumulation no gradients wait for the next micro-batch.
        """
        if num_tried < NUM_FRUITLESS:
            return {*range(len(self.choices))}
        parts = [[number for number in peaks if accumulates[number] == each] for each in (False, True)]
        return {other for part in parts if part for other in self.beside(min(part, key=peaks.__getitem__))}

    def of_all(self, known: Mapping[int, float]) -> Vector:
        """Return the logarithm of a time, or a peak in a unit of about its size, of every configuration.

        Those of some are known, by number: a linear model of them, which has these where it can.
        """
        own, values_K = self._features_NF[list(known)], np.array(list(known.values()))
        result: Vector = self._features_NF @ np.linalg.solve(
            own.T @ own + RIDGE * np.eye(own.shape[1]), own.T @ values_K
        )
        return result

    @cached_property
    def _features_NF(self) -> Vector:
        of_each_NV = np.hstack([np.ones((len(self.sizes), 1)), indicators(self.choices)[0]])
        sizes_N1 = np.array(self.sizes, dtype=np.float64)[:, None]
        return np.hstack([of_each_NV, of_each_NV / sizes_N1, of_each_NV * sizes_N1 / sizes_N1.max()])


def indicators(choices: Sequence[Choice]) -> tuple[Vector, list[tuple[str, Value]]]:
    """Return ones and zeros for each value of each dimension but the micro-batch size, and what each column is of."""
    columns, parts = list[tuple[str, Value]](), [np.zeros((len(choices), 0))]
    for name in choices[0]:
        if name == MICRO_BATCH:
            continue
        values = [choice[name] for choice in choices]
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        columns += [(name, value) for value in numbers]
        parts.append(np.eye(len(numbers))[[numbers[value] for value in values]])
    return np.hstack(parts), columns
