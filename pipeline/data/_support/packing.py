"""Which documents share a sequence; exported scripts hold this code."""

from collections import deque


def best_fit(lengths: list[int], space: int) -> list[list[int]]:
    """Return the indices of the documents of each sequence of `space` tokens: best fit, the longest ones first.

    No document is longer than `space`. TRL's `packing` has the same rule.
    """
    sequences: list[list[int]] = []
    with_space: dict[int, deque[int]] = {}  # the sequences that have so much space left
    known = 0  # bit n is set if there is a sequence with n tokens of space
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[document]
        enough = known >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1  # the least space that is enough
            number = with_space[left].popleft()
            if not with_space[left]:
                known &= ~(1 << left)
            sequences[number].append(document)
        else:
            left, number = space, len(sequences)
            sequences.append([document])
        left -= length
        if left:
            with_space.setdefault(left, deque()).append(number)
            known |= 1 << left
    return sequences
