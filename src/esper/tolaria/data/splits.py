"""Stratified splits by a seeded rule, the same on every machine.

The rule: sample i gets the i-th raw 64-bit number of NumPy's PCG64 generator with the seed (a stream that NumPy keeps
stable between versions), and the samples of each class are dealt out in the order of those numbers. So a split
depends on the labels, the sizes and the seed, and on nothing else.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import BadValueError, DataError

SPLIT_SEED = 20240229
"""The seed of every split of a data set: one validation set for everybody, whatever the seed of a run."""


def stratified_split(
    labels: NDArray[np.int64], sizes: tuple[int, ...], rng_seed: int = SPLIT_SEED
) -> tuple[NDArray[np.int64], ...]:
    """Disjoint index arrays of exactly `sizes` into `labels` (N,), with classes in proportion.

    In each part every class has its proportional count rounded down or up. Each part is in random order, so that its
    beginning is a fair sample of it.
    """
    if labels.ndim != 1:
        raise BadValueError(f"labels must have shape (N,); given {labels.shape}")
    if any(size < 0 for size in sizes):
        raise BadValueError(f"sizes must not be negative; given {sizes}")
    if sum(sizes) > len(labels):
        asked = " + ".join(map(str, sizes))
        raise DataError(f"asked for {asked} = {sum(sizes)} samples out of {len(labels)}; ask for fewer")
    if not len(labels):
        return tuple(np.empty(0, np.int64) for _ in sizes)

    draws = np.random.PCG64(rng_seed).random_raw(len(labels))
    order = np.argsort(draws, kind="stable")
    _, classes, class_counts = np.unique(labels[order], return_inverse=True, return_counts=True)
    counts = _allot(class_counts.tolist(), (*sizes, len(labels) - sum(sizes)))  # the last part is what stays behind

    part_of = np.empty(len(labels), np.int64)  # of each place in `order`
    for index in range(len(class_counts)):
        dealt = [row[index] for row in counts]
        part_of[classes == index] = np.repeat(np.arange(len(counts)), dealt)
    return tuple(order[part_of == part].astype(np.int64) for part in range(len(sizes)))


def _allot(class_counts: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Counts (parts, classes) with the given row and column sums, each the proportional count rounded down or up.

    Every part starts with the counts rounded down; its missing samples go to the classes of largest remainder.
    Where parts compete for the same class, an augmenting path moves an earlier choice. That always succeeds, since
    the proportional counts are themselves a fractional solution and such a flow problem then has a whole one.
    """
    total = sum(class_counts)
    counts = [[size * count // total for count in class_counts] for size in sizes]
    remainders = [[size * count % total for count in class_counts] for size in sizes]
    room = [count - sum(row[index] for row in counts) for index, count in enumerate(class_counts)]
    holders: list[list[int]] = [[] for _ in class_counts]  # the parts that round this class up

    def claim(part: int, visited: set[int]) -> bool:
        by_remainder = sorted(range(len(class_counts)), key=lambda index: -remainders[part][index])
        for index in by_remainder:
            if not remainders[part][index] or index in visited or part in holders[index]:
                continue
            visited.add(index)
            if len(holders[index]) < room[index]:
                holders[index].append(part)
                return True
            for other in holders[index]:
                if claim(other, visited):
                    holders[index].remove(other)
                    holders[index].append(part)
                    return True
        return False

    for part, size in enumerate(sizes):
        for _ in range(size - sum(counts[part])):
            claimed = claim(part, set())
            assert claimed, "a whole solution exists"
    for index, parts in enumerate(holders):
        for part in parts:
            counts[part][index] += 1
    return counts
