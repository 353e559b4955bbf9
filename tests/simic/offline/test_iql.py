"""Implicit Q-learning: its parts by hand, and a toy in which a half-random log holds more than any of its players."""

from math import e, exp, sqrt

import pytest
import torch
from simic.offline.toy import LAYOUT, TABLE, dice, half_random, hasty, learned, mean_return, optimum, play
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.agent import NotFiniteError
from esper.simic.offline.imitation import ImitationConfig, imitate
from esper.simic.offline.iql import (
    IQLConfig,
    ValueFunctions,
    advantage_weights,
    expectile_loss,
    iql,
    q_targets,
    return_deviation,
)
from esper.simic.offline.transitions import Transitions, join
from esper.tamiyo import NetworkConfig, discrete_table, vector_layout

SMALL = NetworkConfig(memory="window", encoder=32, hidden=32, head=32)


def test_expectile_loss_by_hand() -> None:
    """At τ = 0.8: u = 2 costs 0.8 · 4 = 3.2, u = −2 costs 0.2 · 4 = 0.8. At 0.5 both cost half of 4."""
    errors = torch.tensor([2.0, -2.0, 0.0])
    assert expectile_loss(errors, 0.8).tolist() == pytest.approx([3.2, 0.8, 0.0])
    assert expectile_loss(errors, 0.5).tolist() == pytest.approx([2.0, 2.0, 0.0])


def test_what_an_expectile_is() -> None:
    """Of 0 and 1, equally often, at τ = 0.8: 0.8 · (1 − v) = 0.2 · v, so v = 0.8."""
    v = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([v], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        expectile_loss(torch.tensor([0.0, 1.0]) - v, 0.8).sum().backward()
        optimizer.step()
    assert float(v.detach()) == pytest.approx(0.8, abs=1e-3)


def test_advantage_weights_by_hand() -> None:
    """exp(0.5 / 0.5) = e, exp(0) = 1, exp(−1 / 0.5) = e⁻²; exp(5 / 0.5) = 22026 is cut at 100."""
    weights = advantage_weights(torch.tensor([0.5, 0.0, -1.0, 5.0]), 0.5, 100.0)
    assert weights.tolist() == pytest.approx([e, 1.0, exp(-2), 100.0])


def steps_by_hand(rewards: list[list[float]], terminated: list[list[int]], truncated: list[list[int]]) -> Transitions:
    """Episodes of a plain vector with two actions, of which only rewards and ends matter."""
    values = torch.tensor(rewards)
    count, steps = values.shape
    return Transitions(
        observations=torch.arange(float(count * steps)).view(count, steps, 1),
        masks={"action0": torch.ones(count, steps, 2, dtype=torch.bool)},
        actions=torch.zeros(count, steps, 1, dtype=torch.long),
        rewards=values,
        terminated=torch.tensor(terminated).bool(),
        truncated=torch.tensor(truncated).bool(),
        weights=torch.ones_like(values),
        groups=torch.arange(count),
    )


def test_targets_by_hand() -> None:
    """V of the six steps is 10 … 60, γ = 0.5.

    episode 0   1 + 0.5 · 20 = 11;  a panic ends the sequence: 2;  3, the end
    episode 1   4 + 0.5 · 50 = 29;  5 + 0.5 · 60 = 35;             cut: no target
    """
    data = steps_by_hand([[1, 2, 3], [4, 5, 6]], [[0, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 1]])
    steps = data.packed(data.sequences(), [0, 1])
    values = 10 * (steps.cells + 1.0)
    known, targets = q_targets(steps, values, 0.5, 3)
    found = dict(zip(steps.cells.tolist(), zip(known.tolist(), targets.tolist(), strict=True), strict=True))
    assert [found[cell][0] for cell in range(6)] == [True, True, True, True, True, False]
    assert [found[cell][1] for cell in range(5)] == [11, 2, 3, 29, 35]
    # Where neither flag ends an episode, what follows its last step was not recorded either.
    open_end = data._replace(truncated=torch.zeros_like(data.truncated))
    assert q_targets(open_end.packed(open_end.sequences(), [0, 1]), values, 0.5, 3)[0].sum() == 5


def test_deviation_of_returns_by_hand() -> None:
    """γ = 0.5, sequences 1 + 0.5 · 2 = 2 (a panic), 3, and 4 + 0.5 · 4 + 0.25 · 4 = 7. Mean 4, variance 14 / 3."""
    data = steps_by_hand([[1, 2, 3], [4, 4, 4]], [[0, 1, 1], [0, 0, 1]], [[0] * 3] * 2)
    assert return_deviation(data, 0.5) == pytest.approx(sqrt(14 / 3))
    assert return_deviation(data._replace(rewards=torch.zeros(2, 3)), 0.5) == 1.0
    longer = steps_by_hand([[0.0] * 4], [[0, 0, 0, 1]], [[0] * 4])
    alone = return_deviation(join([longer, longer]), 1.0)
    assert alone == 1.0, "padding is no sequence"


@pytest.mark.parametrize("scale", [1.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_beats_the_log_and_its_imitation(scale: float) -> None:
    """The log is half random, half hasty. Its likeliest actions never charge. The learner charges, whether it takes
    its likeliest actions or draws them, and in whatever unit rewards are paid."""
    log = play(half_random, 1000, 5)
    policy = ImitationConfig(SMALL, epochs=10, rate=1e-2)
    config = IQLConfig(SMALL, temperature=0.05, averaging=0.05, epochs=12, rate=1e-2, policy=policy)
    found = iql(log._replace(rewards=scale * log.rewards), TABLE, LAYOUT, config)
    copy = imitate(log, TABLE, LAYOUT, policy).agent
    behaviour = mean_return(half_random)
    for greedy in (False, True):
        own, its = (mean_return(learned(agent, greedy=greedy)) for agent in (found.imitation.agent, copy))
        assert own > max(behaviour, its, mean_return(hasty)) + 1
        assert own > 0.85 * optimum()
    assert 0 < found.effective_share < 0.7
    assert len(found.losses) == 12
    assert found.advantages.shape == log.rewards.shape


def bandit(n: int) -> Transitions:
    """Two steps of a plain vector with three Discrete actions. The first earns 1 for action = sign, and 0 else; the
    second nothing, but costs 5 if the first was action 2."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randint(2, (n,), generator=generator)
    actions = torch.randint(3, (n, 2, 1), generator=generator)
    rewards = torch.stack([(actions[:, 0, 0] == sign).float(), -5.0 * (actions[:, 0, 0] == 2)], 1)
    seen = torch.stack([sign.float(), torch.zeros(n)], 1)
    first = torch.stack([seen, torch.stack([torch.zeros(n), (actions[:, 0, 0] == 2).float()], 1)], 1)
    ends = torch.tensor([[False, True]]).expand(n, 2)
    return Transitions(
        observations=first,
        masks={"action0": torch.ones(n, 2, 3, dtype=torch.bool)},
        actions=actions,
        rewards=rewards,
        terminated=ends,
        truncated=torch.zeros_like(ends),
        weights=torch.ones(n, 2),
        groups=torch.arange(n),
    )


def test_plain_vectors_with_discrete_actions() -> None:
    """From dice alone it learns what pays, now and a step later."""
    data, table, layout = bandit(600), discrete_table([3]), vector_layout(2)
    policy = ImitationConfig(SMALL, epochs=10, rate=1e-2)
    config = IQLConfig(SMALL, temperature=0.05, averaging=0.1, epochs=15, rate=1e-2, policy=policy)
    found = iql(data, table, layout, config)
    agent, state = found.imitation.agent, found.imitation.agent.network.initial_state(2)
    masks = table.open_masks(2)
    decision, _, _ = agent.act(agent.normalise(torch.tensor([[0.0, 0], [1, 0]])), masks, state, greedy=True)
    assert decision.actions.flatten().tolist() == [0, 1]
    by_action = [found.advantages[:, 0][data.actions[:, 0, 0] == action].mean() for action in range(3)]
    assert min(by_action[:2]) > by_action[2], "the cost of a step later counts"


def values(data: Transitions, **changes: object) -> Tensor:
    """V of the first steps after some epochs of pure averaging."""
    config = IQLConfig(SMALL, expectile=0.5, averaging=0.1, epochs=25, rate=1e-2, **changes)  # type: ignore[arg-type]  # by name
    functions = ValueFunctions(data, discrete_table([2]), vector_layout(1), config, 0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.epochs):
        functions.epoch(generator)
    steps = data.packed(data.sequences(), range(data.n_episodes))
    with torch.no_grad():
        found: Tensor = functions.v(*functions._inputs(steps)) * return_deviation(data, config.gamma)
    return found[steps.cells.argsort()].view(data.rewards.shape)


def chains(*, truncated: bool) -> Transitions:
    """Two kinds of episodes, seen as 0 and 1 in every step, that pay 1 and 3 in each of three steps."""
    rewards = [[1.0] * 3, [3.0] * 3] * 100
    ends = [[0, 0, 1]] * 200
    nothing = [[0, 0, 0]] * 200
    data = steps_by_hand(rewards, nothing if truncated else ends, ends if truncated else nothing)
    time = torch.tensor([0.0, 0.3, 0.6])
    return data._replace(observations=(torch.arange(200)[:, None] % 2 + time)[..., None])


def test_values_of_what_ends() -> None:
    """Sums of what is left: 3, 2, 1 and 9, 6, 3."""
    torch.testing.assert_close(
        values(chains(truncated=False))[:2], torch.tensor([[3.0, 2, 1], [9, 6, 3]]), rtol=0.1, atol=0.3
    )


def test_a_cut_is_no_end() -> None:
    """The last step of a cut record has no target. So what came before it is not taken for the end of all rewards."""
    data = chains(truncated=True)
    steps = data.packed(data.sequences(), range(4))
    known, _ = q_targets(steps, torch.zeros(len(steps.cells)), 1.0, 3)
    assert (~known).sum() == 4
    spoilt = data._replace(rewards=data.rewards.clone())
    spoilt.rewards[:, 2] += 100  # in all alike, so that returns deviate as before
    torch.testing.assert_close(values(spoilt, gamma=0.5), values(data, gamma=0.5))


def test_a_reward_that_is_not_finite() -> None:
    """Stops with a remedy."""
    data = play(dice, 10)
    data.rewards[0, 0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"the loss of the values is nan; check the rewards of the records"):
        iql(data, TABLE, LAYOUT, IQLConfig(SMALL, epochs=1))


@pytest.mark.parametrize("changes", [{"expectile": 1.0}, {"expectile": 0.4}, {"temperature": 0.0}, {"averaging": 2.0}])
def test_settings_that_make_no_sense(changes: dict[str, float]) -> None:
    with pytest.raises(BadValueError, match=next(iter(changes))):
        IQLConfig(**changes)  # type: ignore[arg-type]  # by name
