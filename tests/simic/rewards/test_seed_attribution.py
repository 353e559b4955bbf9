"""What each seed is worth."""

import math
from itertools import combinations

import pytest
import torch

from esper.leyline import BadValueError
from esper.simic.rewards import Coalition, Score, leave_one_out, sampled_shapley, shapley
from esper.simic.rewards.attribution import ScoreCoalition, shapley_weights


def glove(coalition: Coalition) -> Score:
    """Two left gloves (0, 1) and a right one (2): 60 points for a pair. Shapley: 10, 10, 40."""
    pair = 2 in coalition and bool(coalition & {0, 1})
    return Score(60.0 if pair else 0.0)


def additive(coalition: Coalition) -> Score:
    """1, 2, 3 … points each, on top of 40."""
    return Score(40.0 + sum(seed + 1 for seed in coalition))


def random_game(seeds: int, images: int = 400) -> ScoreCoalition:
    """Each coalition gets some of the same images right."""
    generator = torch.Generator().manual_seed(seeds)
    hard = torch.rand(images, generator=generator)
    everyone = [frozenset(c) for size in range(seeds + 1) for c in combinations(range(seeds), size)]
    skill = {c: 0.3 + 0.5 * len(c) / seeds + 0.15 * float(torch.rand((), generator=generator)) for c in everyone}

    def score(coalition: Coalition) -> Score:
        correct = hard < skill[coalition]
        return Score(100 * float(correct.double().mean()), correct)

    return score


def test_gloves() -> None:
    """By hand: the right glove is in 4 of 6 orders the last of a pair."""
    found = shapley(glove, 3)
    assert [seed.value for seed in found.seeds] == pytest.approx([10, 10, 40])
    assert (found.method, found.evaluations) == ("exact", 8)
    alone = leave_one_out(glove, 3)
    assert [seed.value for seed in alone.seeds] == [0, 0, 60]
    assert alone.evaluations == 5


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 5, 7])
def test_efficiency(seeds: int) -> None:
    """Values sum to all seeds against none, exact or sampled."""
    score = random_game(seeds)
    found = shapley(score, seeds)
    assert found.method == ("exact" if seeds <= 4 else "sampled")
    whole = score(frozenset(range(seeds))).accuracy - score(frozenset()).accuracy
    assert sum(seed.value for seed in found.seeds) == pytest.approx(whole)
    assert found.together.value == pytest.approx(whole)


@pytest.mark.parametrize("seeds", [3, 6])
def test_other_axioms(seeds: int) -> None:
    """Independent seeds get their own worth, seeds that do nothing nothing, equal seeds the same."""
    assert [seed.value for seed in shapley(additive, seeds).seeds] == pytest.approx(list(range(1, seeds + 1)))
    assert [seed.value for seed in leave_one_out(additive, seeds).seeds] == pytest.approx(list(range(1, seeds + 1)))
    only_first = shapley(lambda coalition: Score(5.0 if 0 in coalition else 0.0), seeds)
    assert [seed.value for seed in only_first.seeds] == pytest.approx([5.0] + [0.0] * (seeds - 1))


def test_paired_errors() -> None:
    """Leave-one-out of one seed: 100 images, 10 won and 4 lost. The difference is 6 ± its standard error, per image."""
    without = torch.tensor([True] * 50 + [False] * 50)
    with_it = without.clone()
    with_it[:4] = False
    with_it[50:60] = True
    scores = {frozenset({0}): Score(56.0, with_it), frozenset(): Score(50.0, without)}
    found = leave_one_out(scores.__getitem__, 1).seeds[0]
    variance = (14 - 100 * 0.06**2) / 99  # differences of ±1 about 0.06
    assert found.value == pytest.approx(6)
    assert found.error == pytest.approx(100 * math.sqrt(variance / 100))


def test_weights_of_two_seeds() -> None:
    """φ = ½ (v(01) − v(1) + v(0) − v(∅)); scores without images have no error."""
    found = shapley(lambda coalition: Score(float(len(coalition))), 2)
    assert [(seed.value, seed.error) for seed in found.seeds] == [(1.0, 0.0), (1.0, 0.0)]
    assert shapley_weights(0, 2) == {
        frozenset({0}): 0.5,
        frozenset(): -0.5,
        frozenset({0, 1}): 0.5,
        frozenset({1}): -0.5,
    }


def test_sampling_approaches_the_exact_value() -> None:
    """Within three of its own errors, which shrink with the number of orders."""
    score = random_game(4)
    exact = shapley(score, 4)
    few, many = (sampled_shapley(score, 4, orders=orders, rng_seed=1) for orders in (8, 400))
    for truth, coarse, fine in zip(exact.seeds, few.seeds, many.seeds, strict=True):
        assert abs(fine.value - truth.value) < 3 * fine.error
        assert fine.error < coarse.error
    assert many.evaluations == 16  # each coalition once


def test_sampling_error_without_noise() -> None:
    """Exact scores still leave the error of not having tried all orders; it covers the truth."""

    def game(coalition: Coalition) -> Score:
        return Score(float(len(coalition) ** 2 + 10 * (0 in coalition and 4 in coalition) * (2 in coalition)))

    found = sampled_shapley(game, 5, orders=60, rng_seed=3)
    truth = [sum(w * game(c).accuracy for c, w in shapley_weights(seed, 5).items()) for seed in range(5)]
    for value, measured in zip(truth, found.seeds, strict=True):
        assert abs(measured.value - value) <= 3 * measured.error + 1e-9
    assert found.seeds[0].error > 0


def test_reproducible() -> None:
    """The same rng_seed, the same orders."""
    score = random_game(6)
    assert shapley(score, 6, rng_seed=5) == shapley(score, 6, rng_seed=5)
    assert shapley(score, 6, rng_seed=5, orders=8) != shapley(score, 6, rng_seed=6, orders=8)


def test_nothing_to_attribute() -> None:
    """A host without seeds is not scored; an odd number of orders has no reverses."""
    assert shapley(glove, 0).seeds == leave_one_out(glove, 0).seeds == ()
    assert shapley(glove, 0).evaluations == 0
    with pytest.raises(BadValueError, match="orders 5"):
        sampled_shapley(glove, 3, orders=5)
    with pytest.raises(BadValueError, match="seeds -1"):
        shapley(glove, -1)
