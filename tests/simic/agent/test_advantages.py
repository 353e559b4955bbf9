"""Which step teaches which head."""

import pytest
import torch
from torch import Tensor

from esper.simic.agent.losses import CENTRED_FROM, compute_gae, compute_per_head_advantages, standardise

ONE_TASK = torch.zeros(12, dtype=torch.long)


def used(n: int, *steps: range) -> Tensor:
    """(n, 1 + heads): the first head always, each other one in these steps."""
    columns = [torch.ones(n, dtype=torch.bool)]
    for some in steps:
        column = torch.zeros(n, dtype=torch.bool)
        column[list(some)] = True
        columns.append(column)
    return torch.stack(columns, -1)


# -- per head ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(28)
def test_first_head_learns_from_the_base() -> None:
    """The first head uses the base tensor itself, without a copy or a write."""
    base = torch.randn(20)
    before = base.clone()
    found = compute_per_head_advantages(base, used(20, range(10), range(3)))
    assert found.by_head[0].data_ptr() == base.data_ptr()
    assert all(part.data_ptr() != base.data_ptr() for part in found.by_head[1:])
    for part in found.by_head[1:]:
        part.zero_()
    assert torch.equal(base, before)


def test_centred_over_the_steps_that_used_a_head() -> None:
    """Steps 2 … 9 hold 2 … 9 with the mean 5.5; the others have no influence, whatever they hold."""
    base = torch.arange(12.0)
    base[11] = torch.nan
    found = compute_per_head_advantages(base, used(12, range(2, 10)))
    assert found.by_head[1][2:10].tolist() == [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert found.uncentred.tolist() == [False, False]


def test_each_head_has_its_own_mean() -> None:
    """0 … 7 has the mean 3.5, 4 … 11 has 7.5."""
    found = compute_per_head_advantages(torch.arange(12.0), used(12, range(8), range(4, 12)))
    assert (float(found.by_head[1][5]), float(found.by_head[2][5])) == (1.5, -2.5)


@pytest.mark.parametrize("steps", [0, 1, CENTRED_FROM - 1])
def test_too_few_steps_to_centre(steps: int) -> None:
    """Left as they are, flagged and finite."""
    base = 3 + torch.randn(12)
    found = compute_per_head_advantages(base, used(12, range(steps)))
    assert found.uncentred.tolist() == [False, True]
    assert torch.equal(found.by_head[1], base)


def test_eight_steps_suffice() -> None:
    """From here on the flag is off and the mean is gone."""
    found = compute_per_head_advantages(torch.full((12,), 3.0), used(12, range(8)))
    assert found.uncentred.tolist() == [False, False]
    assert found.by_head[1][:8].tolist() == [0.0] * 8


def test_nothing_compared_nothing_learnt() -> None:
    """All steps that used the arm drew the same one: their common merit, the op's, says nothing about the arm."""
    used_arm = torch.arange(20) < 10
    rewards = torch.where(used_arm, 10.0, 0.0)
    base = standardise(rewards, torch.ones(20, dtype=torch.bool), torch.zeros(20, dtype=torch.long), 1, 1e-3)
    op, arm = compute_per_head_advantages(base.advantages, torch.stack([torch.ones(20) > 0, used_arm], -1)).by_head
    assert op[used_arm].tolist() == [1.0] * 10
    assert arm[used_arm].tolist() == [0.0] * 10


def learn_arm(seed: int, *, centred: bool) -> float:
    """Probability of the better arm after 60 rounds of policy gradient, from 0.3.

    A bandit of two heads: op 1 pays 10, and ½ more with the better arm; op 0 pays nothing and uses no arm. So every
    step that used the arm head has a large positive advantage, whichever arm it drew.
    """
    generator, logit = torch.Generator().manual_seed(seed), torch.tensor(0.3).logit()
    always, tasks = torch.ones(32, dtype=torch.bool), torch.zeros(32, dtype=torch.long)
    for _ in range(60):
        op, arm = torch.rand((2, 32), generator=generator) < torch.stack([torch.tensor(0.5), logit.sigmoid()])[:, None]
        base = standardise(torch.where(op, 10 + 0.5 * arm, 0.0), always, tasks, 1, 1e-3).advantages
        advantages = compute_per_head_advantages(base, torch.stack([always, op], -1)).by_head[1 if centred else 0]
        logit = logit + 16 * ((arm.float() - logit.sigmoid()) * advantages)[op].mean()  # d log π / d logit = arm − p
    return float(logit.sigmoid())


def test_common_part_does_not_lock_a_head_in() -> None:
    """The op's merit is not the arm's: centred, the better arm is found; else it is a matter of the first draws."""
    assert min(learn_arm(seed, centred=True) for seed in range(5, 9)) > 0.9
    assert min(learn_arm(seed, centred=False) for seed in range(5, 9)) < 0.1


# -- on one scale -----------------------------------------------------------------------------------------------------


def test_standardised_by_hand() -> None:
    """1 3 5 7 has the mean 4 and the variance (9 + 1 + 1 + 9)/4 = 5."""
    found = standardise(torch.tensor([1.0, 3, 5, 7]), torch.ones(4, dtype=torch.bool), ONE_TASK[:4], 1, 0.1)
    assert (found.mean.tolist(), found.floored.tolist()) == ([4.0], [False])
    assert found.std.tolist() == pytest.approx([5**0.5])
    assert found.advantages.tolist() == pytest.approx([-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5])


def test_tasks_are_scaled_apart() -> None:
    """A task with advantages 1000 times as large teaches no louder; one without steps is not floored."""
    tasks = torch.tensor([0, 1, 0, 1, 0, 1])
    advantages = torch.tensor([1.0, 1000, 2, 2000, 3, 3000])
    found = standardise(advantages, torch.ones(6, dtype=torch.bool), tasks, 3, 0.1)
    assert found.advantages[::2].tolist() == pytest.approx(found.advantages[1::2].tolist())
    assert found.mean.tolist() == [2.0, 2000.0, 0.0]
    assert found.floored.tolist() == [False, False, False]


@pytest.mark.requirement(63)
def test_each_task_has_its_own_floor() -> None:
    """Both tasks have ± 1, a deviation of 1. The first is divided by it, the second by its floor of 4."""
    tasks, advantages = torch.tensor([0, 1, 0, 1]), torch.tensor([-1.0, -1, 1, 1])
    found = standardise(advantages, torch.ones(4, dtype=torch.bool), tasks, 2, torch.tensor([0.5, 4.0]))
    assert found.advantages.tolist() == [-1.0, -0.25, 1.0, 0.25]
    assert found.floored.tolist() == [False, True]


@pytest.mark.requirement(56)
def test_forced_steps_and_padding_are_not_counted() -> None:
    """Neither garbage nor zeros in the padding change the moments."""
    advantages = torch.tensor([1.0, torch.nan, 3, 5, 1e30, 7])
    chosen = torch.tensor([True, False, True, True, False, True])
    found = standardise(advantages, chosen, ONE_TASK[:6], 1, 0.1)
    clean = standardise(advantages[chosen], chosen[chosen], ONE_TASK[:4], 1, 0.1)
    assert torch.equal(found.advantages[chosen], clean.advantages)
    assert (found.mean.tolist(), found.std.tolist()) == (clean.mean.tolist(), clean.std.tolist())


@pytest.mark.requirement(63)
def test_constant_rewards() -> None:
    """Only the critic's noise is left; the floor keeps it small and is reported."""
    steps = 16
    values = 1e-4 * torch.randn((4, steps))
    nothing = torch.zeros((4, steps), dtype=torch.bool)
    ends = nothing.clone()
    ends[:, -1] = True
    rewards, bootstraps = torch.zeros((4, steps)), torch.zeros((4, steps))
    lengths = torch.full((4,), steps)
    advantages, _ = compute_gae(rewards, values, ends, bootstraps, nothing, lengths, gamma=1.0, lam=0.95)
    chosen, tasks = torch.ones(64, dtype=torch.bool), torch.zeros(64, dtype=torch.long)
    found = standardise(advantages.flatten(), chosen, tasks, 1, floor=0.01)
    assert found.floored.tolist() == [True]
    assert float(found.advantages.abs().max()) < 0.1
    # Without a floor to speak of they would be as loud as those of any other round.
    loud = standardise(advantages.flatten(), chosen, tasks, 1, floor=1e-12)
    assert loud.floored.tolist() == [False]
    assert float(loud.advantages.abs().max()) > 1


@pytest.mark.requirement(63)
@pytest.mark.parametrize("value", [0.0, 5.3])
def test_equal_advantages(value: float) -> None:
    """Identical advantages become zero and teach nothing."""
    found = standardise(torch.full((12,), value), torch.ones(12, dtype=torch.bool), ONE_TASK, 1, floor=1e-3)
    assert found.floored.tolist() == [True]
    assert found.advantages.abs().max() < 1e-3


def test_nothing_chosen() -> None:
    """A round of forced steps alone: finite, and no task to be flagged."""
    found = standardise(torch.randn(12), torch.zeros(12, dtype=torch.bool), ONE_TASK, 1, floor=1e-3)
    assert bool(found.advantages.isfinite().all())
    assert found.floored.tolist() == [False]
