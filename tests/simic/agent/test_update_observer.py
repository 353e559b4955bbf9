"""Whoever looks on at an update sees all of it, and changes nothing."""

import math

import pytest
import torch
from rounds import collect, make_agent
from torch import Tensor, nn

from esper.simic.agent import PPOAgent, PPOUpdateMetrics


class Witness:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.cells: list[Tensor] = []
        self.joint: list[Tensor] = []

    def on_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """All of it, as numbers."""
        squares = [weight.grad.square().sum() for weight in network.parameters() if weight.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))
        self.cells.append(cells)
        self.joint.append(log_ratios.where(decided, 0.0).sum(-1))


def update(agent: PPOAgent, witness: Witness | None) -> PPOUpdateMetrics:
    """One update on a round of noise."""
    return agent.update(collect(agent), witness)


@pytest.mark.parametrize("pieces", [1, 2])
def test_all_of_it_is_shown(pieces: int) -> None:
    """Gradients before clipping, every step of the round once per epoch, and the ratios that the metrics tell of."""
    agent, witness = make_agent(clip_norm=1e-3, pieces=pieces, target_kl=None), Witness()
    buffer = collect(agent)
    metrics = agent.update(buffer, witness)
    assert len(witness.norms) == agent.config.epochs * agent.config.minibatches
    assert max(witness.norms) == pytest.approx(metrics.pre_clip_grad_norm, rel=1e-5)
    assert max(witness.norms) > 10 * agent.config.clip_norm, "or it would not show that it is before clipping"
    seen = torch.cat(witness.cells[: agent.config.minibatches]).sort().values
    assert torch.equal(seen, buffer.valid.flatten().nonzero().flatten())
    joint = torch.cat(witness.joint)
    assert math.exp(float(joint.max())) == pytest.approx(metrics.joint_ratio_max)
    assert math.exp(float(joint.min())) == pytest.approx(metrics.joint_ratio_min)


def test_nothing_depends_on_it() -> None:
    """Bit for bit: metrics, weights, moments, and the generator after it."""
    alone, watched = make_agent(), make_agent()
    assert update(alone, None) == update(watched, Witness())
    for mine, other in zip(alone.network.parameters(), watched.network.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(alone.optimizer.state[mine]["exp_avg_sq"], watched.optimizer.state[other]["exp_avg_sq"])
    assert torch.equal(alone.generator.get_state(), watched.generator.get_state())
