"""Randomness by counter."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.tolaria.batches import counter_below, counter_hash, permutation

SEEDS = st.integers(0, 2**63 - 1)
BINS = 16
DRAWS = 4096


@pytest.mark.invariant(13)
@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ((), 0),
        ((0,), 1_133_876_534),
        ((1,), 2_679_655_239),
        ((0, 0), 1_956_438_459),
        ((1, 2), 2_165_629_739),
        ((2, 1), 3_000_624_289),
        ((2**32,), 1_121_833_662),
        ((2**40 + 7, 3, 5), 676_296_520),
    ],
)
def test_known_values(keys: tuple[int, ...], value: int) -> None:
    """These values must never change, or old runs could not be repeated."""
    assert int(counter_hash(*keys)) == value


@pytest.mark.invariant(13)
def test_known_permutation() -> None:
    """The order of the data must never change either."""
    assert permutation(8, 1, 2).tolist() == [4, 0, 6, 1, 5, 2, 3, 7]


def _finalised(value: int) -> int:
    """The finaliser of murmur3, in Python's own integers."""
    value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
    value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
    return value ^ value >> 16


@given(st.lists(SEEDS, max_size=4))
def test_equals_integers_without_overflow(keys: list[int]) -> None:
    """Products that overflow 64 bits lose nothing that counts."""
    value = 0
    for key in keys:
        for half in (key % 2**32, key // 2**32):
            value = _finalised(((value ^ half) * 0x9E3779B1 + 0x7F4A7C15) % 2**32)
    assert int(counter_hash(*keys)) == value


def test_pure() -> None:
    """Neither earlier draws nor the global generator matter, and the generator is not touched."""
    torch.manual_seed(1)
    state, first = torch.get_rng_state(), counter_hash(5, 6)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    counter_hash(7)
    assert torch.equal(counter_hash(5, 6), first)


@given(st.lists(SEEDS, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 62))
def test_every_bit_of_every_key_counts(keys: list[int], place: int, bit: int) -> None:
    """One bit flipped, in either half of a 64-bit seed, gives another number: each round is a bijection of its key."""
    changed = list(keys)
    changed[place % len(keys)] ^= 1 << bit
    assert int(counter_hash(*keys)) != int(counter_hash(*changed))


def test_order_of_the_keys_counts() -> None:
    """All orders of four keys give different numbers."""
    values = {int(counter_hash(*keys)) for keys in permutations((1, 2, 3, 4))}
    assert len(values) == 24


def test_number_of_keys_counts() -> None:
    """A key of zero is a key."""
    assert len({int(counter_hash(*[0] * count)) for count in range(8)}) == 8


@pytest.mark.parametrize("place", [0, 1, 2], ids=["seed", "index", "sample"])
def test_uniform(place: int) -> None:
    """Counting up any one key fills 16 bins evenly, by the highest bits and by the remainder, with the right mean."""
    keys: list[int | torch.Tensor] = [11, 22, 33]
    keys[place] = torch.arange(DRAWS)
    value = counter_hash(*keys)
    assert value.min() >= 0
    assert value.max() < 2**32
    for bins in (value >> 28, value % BINS):
        counts = torch.bincount(bins, minlength=BINS).double()
        expected = DRAWS / BINS
        # Chi-square of 15 degrees of freedom exceeds 44.3 once in ten thousand draws.
        assert float(((counts - expected) ** 2 / expected).sum()) < 44.3
    # The mean of n uniform numbers deviates by sqrt(1/12n) = 0.0045.
    assert float(value.double().mean()) / 2**32 == pytest.approx(0.5, abs=4 * 0.0045)


def test_neighbours_are_uncorrelated() -> None:
    """Numbers of neighbouring samples and of neighbouring minibatches: |r| below four times 1/sqrt(n)."""
    table = counter_hash(3, torch.arange(64)[:, None], torch.arange(64)).double()
    for left, right in ((table[:, 1:], table[:, :-1]), (table[1:], table[:-1])):
        pair = torch.stack([left.flatten(), right.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / left.numel() ** 0.5


def test_broadcast() -> None:
    """Tensor keys broadcast; each element is what its own integers give."""
    rows, columns = torch.tensor([[3], [2**33]]), torch.tensor([0, 1, 2**62])
    found = counter_hash(9, rows, 4, columns)
    assert found.shape == (2, 3)
    assert found.dtype == torch.int64
    for row in range(2):
        for column in range(3):
            alone = counter_hash(9, int(rows[row, 0]), 4, int(columns[column]))
            assert int(found[row, column]) == int(alone)


def test_tensor_and_int_keys_agree() -> None:
    """A key of no axes is the integer it holds, whatever its dtype."""
    for dtype in (torch.int32, torch.int64):
        assert torch.equal(counter_hash(torch.tensor(12, dtype=dtype), 3), counter_hash(12, 3))


@given(st.integers(1, 1000), SEEDS)
def test_below(limit: int, seed: int) -> None:
    """In [0, limit), and the hash's own remainder."""
    drawn = counter_below(limit, seed, torch.arange(20))
    assert bool(((drawn >= 0) & (drawn < limit)).all())
    assert torch.equal(drawn, counter_hash(seed, torch.arange(20)) % limit)


def test_below_reaches_every_value() -> None:
    """Both ends included."""
    assert counter_below(9, 1, torch.arange(500)).unique().tolist() == list(range(9))


@given(st.integers(1, 300), SEEDS, st.integers(0, 50))
def test_permutation(count: int, seed: int, epoch: int) -> None:
    """Every number once, the same for the same keys."""
    found = permutation(count, seed, epoch)
    assert found.sort().values.tolist() == list(range(count))
    assert torch.equal(found, permutation(count, seed, epoch))


def test_permutations_differ_by_key() -> None:
    """Each seed, epoch and purpose has its own order, and none is the identity."""
    keys = [(seed, epoch, purpose) for seed in (0, 1, 2**40) for epoch in range(3) for purpose in range(3)]
    found = {tuple(permutation(50, *key).tolist()) for key in keys} | {tuple(range(50))}
    assert len(found) == len(keys) + 1
