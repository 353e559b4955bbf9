"""A critic from records: returns by hand, and what it learns."""

import pytest
import torch

from esper.simic.agent import PPOAgent, PPOConfig
from esper.simic.offline.critic import fit_critic, returns_to_go
from esper.simic.offline.transitions import Transitions
from esper.tamiyo import NetworkConfig, discrete_table, vector_layout

TABLE, LAYOUT = discrete_table([2]), vector_layout(1)


def episodes(rewards: list[list[float]], terminated: list[list[bool]], seen: list[list[float]]) -> Transitions:
    """Episodes with these rewards and ends; the observation is one number per step."""
    shape = len(rewards), len(rewards[0])
    masks = {"action0": torch.ones(*shape, 2, dtype=torch.bool)}
    ends = torch.tensor(terminated)
    return Transitions(
        torch.tensor(seen)[..., None],
        masks,
        torch.zeros(*shape, 1, dtype=torch.long),
        torch.tensor(rewards),
        ends,
        torch.zeros_like(ends),
        torch.ones(shape),
        torch.arange(shape[0]),
    )


def test_returns_by_hand() -> None:
    """γ = ½. The first sequence ends with the second step (a panic): 1 + ½·2 = 2, then 2. The next one: 4 + ½·8 = 8."""
    data = episodes([[1.0, 2.0, 4.0, 8.0]], [[False, True, False, True]], [[0.0] * 4])
    assert returns_to_go(data, 0.5).tolist() == [[2.0, 2.0, 8.0, 8.0]]


def test_the_critic_learns_returns_and_the_actor_stays() -> None:
    """Every return is the observation of its step, times the scale of the task: rewards are those that add up to it."""
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(200, 2, generator=generator)
    tasks = torch.arange(200) % 2
    scaled = seen * torch.tensor([10.0, 1000.0])[tasks][:, None]
    rewards = torch.stack([scaled[:, 0] - scaled[:, 1], scaled[:, 1]], 1)
    data = episodes(rewards.tolist(), [[False, True]] * 200, seen.tolist())
    network = NetworkConfig(memory="window", encoder=16, hidden=16, head=16)
    agent = PPOAgent(TABLE, LAYOUT, PPOConfig(network=network), tasks=2)
    before = {name: weight.clone() for name, weight in agent.network.state_dict().items()}
    fit_critic(agent, data, tasks, 1.0, torch.Generator().manual_seed(0))
    steps = data.packed(data.sequences(), range(200))
    core, encoded = agent.network.read(agent.normalise(steps.observations), steps.stretches, steps.n_sequences)
    task = tasks[steps.cells // 2]
    values = agent.values_of(agent.network.value(core, encoded), task).detach()
    returns = returns_to_go(data, 1.0).flatten()[steps.cells]
    for number in (0, 1):
        of_task = task == number
        unexplained = (values - returns)[of_task].var() / returns[of_task].var()
        assert float(unexplained) < 0.1
    moved = {name for name, weight in agent.network.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved and all(name.startswith("critic") for name in moved)
    assert agent.returns.statistics.std.tolist() == pytest.approx([10.0, 1000.0], rel=0.2)
