"""The three networks of offline learning: each trains, on factored actions with masks and on plain vectors."""

from collections.abc import Callable

import pytest
import torch
from simic.offline.toy import LAYOUT, LIGHTS, PRESS, STEPS, TABLE, WAIT, best, dice, play, worth
from simic.training.tiny import make_runner
from torch import Tensor, nn

from esper.simic.offline.imitation import imitation_loss
from esper.simic.offline.networks import PolicyNetwork, QNetwork, VNetwork
from esper.simic.offline.transitions import PackedSteps, Transitions
from esper.tamiyo import ActionTable, NetworkConfig, ObservationLayout, discrete_table, vector_layout

SMALL = NetworkConfig(encoder=32, hidden=32, head=32)


def plain(n: int) -> Transitions:
    """Two Discrete actions at random on a plain vector; the return of a step is 1 if both equal the bits that were seen
    a step before."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(2, (n, 4, 2), generator=generator)
    actions = torch.randint(2, (n, 4, 2), generator=generator)
    earlier = bits.roll(1, 1)
    earlier[:, 0] = 0
    ends = torch.zeros(n, 4, dtype=torch.bool)
    ends[:, -1] = True
    return Transitions(
        observations=bits.float() - 0.5,
        masks={name: torch.ones(n, 4, 2, dtype=torch.bool) for name in ("action0", "action1")},
        actions=actions,
        rewards=(actions == earlier).all(-1).float(),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        weights=torch.ones(n, 4),
        groups=torch.arange(n),
    )


CASES = {"factored": (TABLE, LAYOUT), "plain": (discrete_table([2, 2]), vector_layout(2))}


def packed(data: Transitions) -> PackedSteps:
    return data.packed(data.sequences(), range(data.n_episodes))


def fit(network: nn.Module, loss_of: Callable[[], Tensor], steps: int = 150) -> float:
    """Lower a loss by Adam; returns the last one."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("case", CASES)
def test_policy_network(case: str) -> None:
    """It learns what its teacher does, which only the steps before tell."""
    table, layout = CASES[case]
    data = play(best, 250) if case == "factored" else plain(250)
    if case == "plain":
        earlier = (data.observations.roll(1, 1) > 0).long()
        earlier[:, 0] = 0
        data = data._replace(actions=earlier)
    steps, network = packed(data), PolicyNetwork(table, layout, SMALL)
    assert network.config.memory == "window"

    def loss() -> Tensor:
        core, encoded = network.read(steps.observations, steps.stretches, steps.n_sequences)
        decision = network.decide(core, encoded, steps.masks, 0.0, actions=steps.actions, measured=False)
        return imitation_loss(decision, steps.weights / len(steps.weights))

    assert float(loss().detach()) > 0.3
    assert fit(network, loss) < 0.05


def known_values(case: str, data: Transitions) -> Tensor:
    """(E, T): in the toy, what the best player can still expect; on plain vectors, the bits that were seen before."""
    if case == "plain":
        earlier = (data.observations.roll(1, 1) > 0).float().sum(-1)
        earlier[:, 0] = 0
        return earlier
    ops = torch.tensor(worth()[1])[torch.arange(STEPS), data.observations[..., LIGHTS].long()]  # by step and charge
    return ops.masked_fill(~data.masks["op"], -torch.inf).amax(-1)


@pytest.mark.parametrize("case", CASES)
def test_v_network(case: str) -> None:
    """It learns values that depend on several columns, or on the step before."""
    data = play(dice, 300) if case == "factored" else plain(300)
    steps, network = packed(data), VNetwork(CASES[case][1], SMALL)
    targets = known_values(case, data).flatten()[steps.cells]
    targets = (targets - targets.mean()) / targets.std()

    def loss() -> Tensor:
        values: Tensor = network(steps.observations, steps.stretches, steps.n_sequences)
        return (values - targets).square().mean()

    assert 1 - fit(network, loss) > 0.95


@pytest.mark.parametrize("case", CASES)
def test_q_network(case: str) -> None:
    """It learns the reward of every action, which depends on the step before and on all heads together."""
    table, layout = CASES[case]
    data = play(dice, 300) if case == "factored" else plain(300)
    steps, network = packed(data), QNetwork(table, layout, SMALL)
    targets = (steps.rewards - steps.rewards.mean()) / steps.rewards.std()

    def loss() -> Tensor:
        values: Tensor = network(steps.observations, steps.stretches, steps.n_sequences, steps.actions)
        return (values - targets).square().mean()

    assert 1 - fit(network, loss) > 0.9


def test_unused_heads_have_no_effect() -> None:
    """WAIT is worth the same whatever light stands beside it; PRESS is not."""
    network, steps = QNetwork(TABLE, LAYOUT, NetworkConfig(head_gain=1.0)), packed(play(dice, 3))

    def value(op: int, light: int) -> Tensor:
        actions = torch.tensor([[op, light]]).expand_as(steps.actions)
        found: Tensor = network(steps.observations, steps.stretches, steps.n_sequences, actions)
        return found

    with torch.no_grad():
        assert torch.equal(value(WAIT, 0), value(WAIT, 3))
        assert not torch.isclose(value(PRESS, 0), value(PRESS, 3)).any()


def growth() -> tuple[ActionTable, ObservationLayout]:
    runner = make_runner(1, 1)
    return runner.table, runner.layout


def test_values_see_slots_and_the_critic_does_not_act() -> None:
    """On hosts with slots: Q depends on which slot and which blueprint; both values see the critic's columns, the
    policy does not."""
    table, layout = growth()
    torch.manual_seed(1)
    config = NetworkConfig(head_gain=1.0)
    q, v, policy = QNetwork(table, layout, config), VNetwork(layout, config), PolicyNetwork(table, layout, config)
    data = plain(1)
    stretches, count = (steps := packed(data)).stretches, steps.n_sequences
    seen = torch.randn(4, layout.size)
    other = seen.clone()
    other[:, -1] += 1.0
    germinate = torch.tensor([[1, 0, 0]] * 4)
    with torch.no_grad():
        first = q(seen, stretches, count, germinate)
        for head in (1, 2):
            changed = germinate.clone()
            changed[:, head] = 1
            assert not torch.isclose(q(seen, stretches, count, changed), first).any()
        assert not torch.isclose(q(other, stretches, count, germinate), first).any()
        assert not torch.isclose(v(other, stretches, count), v(seen, stretches, count)).any()
        decisions = [
            policy.decide(*policy.read(each, stretches, count), table.open_masks(4), 0.0, actions=germinate)
            for each in (seen, other)
        ]
    assert torch.equal(decisions[0].log_probs, decisions[1].log_probs)
