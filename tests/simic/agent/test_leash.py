"""Updates that improve a policy from elsewhere: the critic first, a leash to the start, a baseline from the group."""

from pathlib import Path

import pytest
import torch
from rounds import collect, make_agent
from torch import Tensor

from esper.simic.agent import PPOAgent, load_agent, save_agent
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.losses import kl_terms, leave_one_out, ratios


def weights(agent: PPOAgent) -> dict[str, Tensor]:
    """Copies of all of them."""
    return {name: weight.detach().clone() for name, weight in agent.network.named_parameters()}


def test_the_critic_learns_alone_at_first() -> None:
    """Its own layers change, no other weight does by a bit; after that, everything does."""
    agent = make_agent(critic_first=1, target_kl=None)
    before = weights(agent)
    agent.update(collect(agent))
    after = weights(agent)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("critic")}
    agent.update(collect(agent, seed=1))
    last = weights(agent)
    assert all(not torch.equal(after[name], last[name]) for name in ("actor.weight", "trunk.0.weight"))


def test_the_leash_pulls_by_the_kl_from_the_start() -> None:
    """Of two choices, p = 0.8 at the start and q now: averaged over q, the gradient of r − 1 − log r by the logit of
    the first is that of KL(p ‖ q), which is q − p."""
    logit = torch.tensor(0.3, requires_grad=True)
    start = torch.tensor([0.8, 0.2]).log()
    log_probs = torch.log_softmax(torch.stack([logit, torch.zeros(())]), 0)
    now = log_probs.exp().detach()
    (now * kl_terms(*ratios(start, log_probs))).sum().backward()
    assert float(logit.grad or 0.0) == pytest.approx(float(now[0]) - 0.8, abs=1e-6)


def test_a_short_leash_keeps_the_policy_near_its_start() -> None:
    """The same rounds of noise move it less; without a start there is nothing to hold to."""
    moved = []
    for leash in (0.0, 30.0):
        agent = make_agent(leash=leash, leash_until=1.0, target_kl=None, entropy=0.0, logit_penalty=0.0)
        agent.hold_to_start()
        for seed in range(3):
            agent.update(collect(agent, seed=seed))
        buffer = collect(agent, seed=9)
        batches = agent._partition(buffer, buffer.sequences())
        agent.start, mine = agent.start, agent._reference(buffer, batches).log_probs
        now = agent._start_log_probs(buffer, batches) if leash else None
        if now is None:
            agent.config = make_agent(leash=1.0, leash_until=1.0).config
            now = agent._start_log_probs(buffer, batches)
        assert now is not None
        moved.append(float((mine - now).abs().mean()))
    assert moved[1] < moved[0] / 2
    assert make_agent(leash=1.0).leash == 0.0


def test_the_leash_is_let_out() -> None:
    """From its first value to 0 at the given share of the run."""
    config = PPOConfig(leash=2.0, leash_until=0.5)
    assert [config.leash_at(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == [2.0, 1.0, 0.0, 0.0]


def test_a_leashed_agent_is_saved_with_its_start(tmp_path: Path) -> None:
    """It goes on to the bit."""
    agent = make_agent(leash=1.0, leash_until=1.0)
    agent.hold_to_start()
    agent.update(collect(agent))
    save_agent(agent, tmp_path / "agent")
    again, _ = load_agent(tmp_path / "agent")
    for each in (agent, again):
        each.update(collect(each, seed=1))
    one, other = weights(agent), weights(again)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_leave_one_out_by_hand() -> None:
    """A group of three: 1 − (4 + 7)/2, 4 − (1 + 7)/2, 7 − (1 + 4)/2. In the second step its last member has ended, so
    2 − 6 and 6 − 2. An env alone keeps its own."""
    advantages = torch.tensor([[1.0, 2.0], [4.0, 6.0], [7.0, 99.0], [5.0, 3.0]])
    valid = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    found = leave_one_out(advantages, valid, torch.tensor([0, 0, 0, 1]))
    assert found[valid].tolist() == [-4.5, -4.0, 0.0, 4.0, 4.5, 5.0, 3.0]
