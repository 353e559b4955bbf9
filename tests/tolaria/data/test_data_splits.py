"""Splits: exact, disjoint, in proportion, and the same everywhere."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import BadValueError, DataError
from esper.tolaria.data.arrays import stratified_split


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], tuple[int, ...], int]:
    """Labels, sizes that fit, and a seed."""
    labels = draw(st.lists(st.integers(-2, 6), min_size=0, max_size=60))
    left, sizes = len(labels), []
    for _ in range(draw(st.integers(0, 5))):
        sizes.append(draw(st.integers(0, left)))
        left -= sizes[-1]
    return labels, tuple(sizes), draw(st.integers(0, 2**32))


@given(requests())
def test_properties(request_: tuple[list[int], tuple[int, ...], int]) -> None:
    given_labels, sizes, seed = request_
    labels = np.array(given_labels, np.int64)
    parts = stratified_split(labels, sizes, seed)
    assert tuple(len(part) for part in parts) == sizes
    chosen = [int(index) for part in parts for index in part]
    assert len(set(chosen)) == len(chosen)
    assert all(0 <= index < len(labels) for index in chosen)
    for part, size in zip(parts, sizes, strict=True):
        for label in set(given_labels):
            exact = Fraction(size * given_labels.count(label), len(labels))
            assert abs(int((labels[part] == label).sum()) - exact) < 1
    again = stratified_split(labels, sizes, seed)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_largest_remainder_by_hand() -> None:
    # 4 of 10: 0.4 × (5, 3, 2) = (2.0, 1.2, 0.8): rounded down (2, 1, 0), and the last sample to the remainder 0.8.
    labels = np.repeat(np.arange(3), (5, 3, 2))
    (part,) = stratified_split(labels, (4,), 0)
    assert np.bincount(labels[part]).tolist() == [2, 1, 1]


def test_parts_that_compete_for_a_class() -> None:
    # Three classes of one sample, three parts of one: each remainder is 1/3, and the same class cannot serve all.
    parts = stratified_split(np.arange(3), (1, 1, 1), 0)
    assert sorted(int(part[0]) for part in parts) == [0, 1, 2]


def test_the_rule_is_fixed() -> None:
    # PCG64(7) draws 0.625, 0.897, 0.776, 0.225, 0.300, 0.874 of 2**64: in order 3, 4, 0, 2, 5, 1.
    # Labels by that order: 1, 0, 0, 0, 1, 1; a part of two takes the first of each class, 3 and 4.
    labels = np.array([0, 1, 0, 1, 0, 1])
    first, second = stratified_split(labels, (2, 4), 7)
    assert first.tolist() == [3, 4]
    assert second.tolist() == [0, 2, 5, 1]


def test_another_seed_another_split() -> None:
    labels = np.arange(1000) % 10
    one, other = (stratified_split(labels, (100,), seed)[0] for seed in (0, 1))
    assert set(one.tolist()) != set(other.tolist())


def test_the_beginning_of_a_part_is_a_fair_sample() -> None:
    labels = np.repeat(np.arange(10), 100)  # sorted by class, as class folders are
    (part,) = stratified_split(labels, (500,))
    assert len(set(labels[part[:100]].tolist())) == 10


def test_refusals() -> None:
    labels = np.zeros(10, np.int64)
    with pytest.raises(DataError, match=r"6 \+ 5 = 11 samples out of 10"):
        stratified_split(labels, (6, 5))
    with pytest.raises(BadValueError, match="negative"):
        stratified_split(labels, (-1, 5))
    with pytest.raises(BadValueError, match="shape"):
        stratified_split(labels.reshape(2, 5), (1,))
