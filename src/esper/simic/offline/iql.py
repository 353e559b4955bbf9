"""Implicit Q-learning: values from records alone, then a policy that imitates the actions that were better than usual.

    V   moves to an upper expectile of Q over the recorded actions:   |τ − 1(u < 0)|·u²,  u = min(Q̄₁, Q̄₂)(s, a) − V(s)
    Q   moves to r + γ·V(s'), and to r where nothing follows;   Q̄ is its slow average
    π   imitates each step with weight exp((min(Q̄₁, Q̄₂)(s, a) − V(s)) / temperature)

No action that was not recorded is ever judged. Values do not depend on the policy, so they are learnt first, and
`imitate` learns the policy from the weighted steps. Rewards are divided by the deviation of the returns.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import DEFAULT_GAMMA, BadValueError
from esper.leyline.numbers import require_positive, require_share, require_whole
from esper.leyline.progress import Advance, ignore
from esper.simic.agent import NotFiniteError
from esper.simic.offline.imitation import EPISODES_AT_ONCE, Imitation, ImitationConfig, imitate, new_agent
from esper.simic.offline.networks import QNetwork, VNetwork, windowed
from esper.simic.offline.transitions import PackedSteps, Transitions
from esper.tamiyo import ActionTable, NetworkConfig, ObservationLayout
from esper.tamiyo.encoder import Stretches

Inputs = tuple[Tensor, Stretches, int]  # of a value function: normalised observations, in packed order


@dataclass(frozen=True)
class IQLConfig:
    """Settings of implicit Q-learning. Advantages are in deviations of the returns."""

    network: NetworkConfig = field(default_factory=windowed)
    """Sizes of the value functions."""
    gamma: float = DEFAULT_GAMMA
    """Discount; that of the rewards."""
    expectile: float = 0.7
    """Which of the recorded actions a state is valued by: 0.5 is their mean, 1 would be the best of them."""
    temperature: float = 0.05
    """Advantage for which an action weighs e times as much."""
    most: float = 100.0
    """Largest weight of a step."""
    averaging: float = 0.05
    """Share by which the slow averages of Q move to Q in each step."""
    epochs: int = 40
    """Passes over the episodes for the values. More fit the luck of single episodes."""
    batch: int = 32
    """Episodes per minibatch."""
    rate: float = 1e-3
    """Adam's learning rate for the values; it falls linearly to a tenth."""
    decay: float = 1e-3
    """Weight decay of the value functions."""
    clip_norm: float = 1.0
    """Global norm at which their gradients are clipped."""
    policy: ImitationConfig = field(default_factory=lambda: ImitationConfig(epochs=30, batch=32))
    """How the policy learns from the weighted steps."""

    def __post_init__(self) -> None:
        if not 0.5 <= self.expectile < 1:
            raise BadValueError(f"expectile {self.expectile!r} is not in [0.5, 1); 0.5 values the recorded actions")
        for name in ("gamma", "averaging"):
            require_share(name, getattr(self, name))
        for name in ("temperature", "most", "rate", "clip_norm"):
            require_positive(name, getattr(self, name))
        for name in ("epochs", "batch"):
            require_whole(name, getattr(self, name), 1)


class ValueLosses(NamedTuple):
    """Losses of an epoch, means over its steps."""

    v: float
    q: float  # mean over the two


class IQL(NamedTuple):
    """A policy learnt by implicit Q-learning."""

    imitation: Imitation  # the agent, and how well it does what weighs most
    losses: list[ValueLosses]  # by epoch
    advantages: Tensor  # (E, T), in deviations of the returns
    effective_share: float  # (Σ w)² / (n Σ w²): the share of the steps that the policy in effect learns from


def expectile_loss(errors: Tensor, tau: float) -> Tensor:
    """|τ − 1(u < 0)|·u² of errors u: at τ above 0.5, being too low costs more than being too high."""
    return (tau - (errors < 0).float()).abs() * errors.square()


def advantage_weights(advantages: Tensor, temperature: float, most: float) -> Tensor:
    """exp(advantage / temperature), at most `most`."""
    return (advantages / temperature).exp().clamp(max=most)


def iql(
    data: Transitions,
    table: ActionTable,
    layout: ObservationLayout,
    config: IQLConfig | None = None,
    *,
    rng_seed: int = 0,
    advance: Advance = ignore,
) -> IQL:
    """Learn a policy from transitions with rewards. `advance` counts epochs of the values and of the policy."""
    config = config if config is not None else IQLConfig()
    values = ValueFunctions(data, table, layout, config, rng_seed)
    generator, losses = torch.Generator().manual_seed(rng_seed), []
    for _ in range(config.epochs):
        losses.append(values.epoch(generator))
        advance(1)
    advantages = values.advantages()
    weights = data.weights * advantage_weights(advantages, config.temperature, config.most)
    learned = imitate(data._replace(weights=weights), table, layout, config.policy, rng_seed=rng_seed, advance=advance)
    share = weights.sum().square() / (weights.square().sum() * (data.weights > 0).sum())
    return IQL(learned, losses, advantages, float(share))


class ValueFunctions:
    """V, two Qs and their slow averages, on one set of transitions."""

    def __init__(
        self, data: Transitions, table: ActionTable, layout: ObservationLayout, config: IQLConfig, rng_seed: int
    ) -> None:
        self.config = config
        self.normalise = new_agent(table, layout, config.network, data, rng_seed).normalise
        self.data = data._replace(rewards=data.rewards / return_deviation(data, config.gamma))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng_seed)
            self.v = VNetwork(layout, config.network)
            self.q = nn.ModuleList([QNetwork(table, layout, config.network) for _ in range(2)])
        self.slow = deepcopy(self.q).requires_grad_(False)
        self.weights = [*self.v.parameters(), *self.q.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=config.rate, weight_decay=config.decay)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, config.epochs)

    def epoch(self, generator: torch.Generator) -> ValueLosses:
        """Learn from every episode once."""
        losses = [self.step(steps) for steps in self.data.minibatches(self.config.batch, generator)]
        self.schedule.step()
        v, q = torch.tensor(losses).mean(0).tolist()
        return ValueLosses(v, q)

    def step(self, steps: PackedSteps) -> ValueLosses:
        """Take one step of Adam on a minibatch."""
        config, inputs = self.config, self._inputs(steps)
        counted = steps.weights > 0
        v = self.v(*inputs)
        with torch.no_grad():
            slow = self._least(inputs, steps.actions)
            known, targets = q_targets(steps, v, config.gamma, self.data.actions.shape[1])
        v_loss = _mean(expectile_loss(slow - v, config.expectile), counted)
        q_losses = [_mean((q(*inputs, steps.actions) - targets).square(), counted & known) for q in self.q]
        loss = v_loss + torch.stack(q_losses).sum()
        if not bool(loss.isfinite()):
            raise NotFiniteError(f"the loss of the values is {float(loss.detach())}; check the rewards of the records")
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, config.clip_norm)
        self.optimizer.step()
        self._average()
        return ValueLosses(float(v_loss.detach()), float(torch.stack(q_losses).detach().mean()))

    @torch.no_grad()
    def advantages(self) -> Tensor:
        """(E, T): min(Q̄₁, Q̄₂)(s, a) − V(s) of every step."""
        sequences, result = self.data.sequences(), torch.zeros_like(self.data.rewards)
        for rows in torch.arange(self.data.n_episodes).split(EPISODES_AT_ONCE):
            steps = self.data.packed(sequences, rows.tolist())
            inputs = self._inputs(steps)
            result.view(-1)[steps.cells] = self._least(inputs, steps.actions) - self.v(*inputs)
        return result

    def _inputs(self, steps: PackedSteps) -> Inputs:
        return self.normalise(steps.observations), steps.stretches, steps.n_sequences

    def _least(self, inputs: Inputs, actions: Tensor) -> Tensor:
        """(steps,): the lower of the two slow Qs."""
        return torch.stack([q(*inputs, actions) for q in self.slow]).amin(0)

    @torch.no_grad()
    def _average(self) -> None:
        for slow, fast in zip(self.slow.parameters(), self.q.parameters(), strict=True):
            slow.lerp_(fast, self.config.averaging)


def q_targets(steps: PackedSteps, v: Tensor, gamma: float, width: int) -> tuple[Tensor, Tensor]:
    """Which steps have a target (steps,) bool, and r + γ·V(s') for these. `width`: steps of an episode.

    Where a sequence terminated, nothing follows and the target is r. Where it was cut, what follows was not recorded,
    and there is no target.
    """
    follows = ~(steps.terminated | steps.truncated) & ((steps.cells + 1) % width != 0)
    position = torch.zeros(int(steps.cells.max()) + 2, dtype=torch.long)
    position[steps.cells] = torch.arange(len(steps.cells))
    following = v.detach()[position[steps.cells + 1]].where(follows, 0.0)
    return follows | steps.terminated, steps.rewards + gamma * following


def return_deviation(data: Transitions, gamma: float) -> float:
    """The standard deviation of the discounted returns of whole sequences; 1 if they are all equal."""
    rewards, ends = data.rewards.double(), data.terminated | data.truncated
    total, returns = torch.zeros(data.n_episodes, dtype=torch.float64), []
    for step in reversed(range(rewards.shape[1])):
        total = rewards[:, step] + gamma * total.where(~ends[:, step], 0.0)
        starts = ends[:, step - 1] if step else torch.ones_like(ends[:, 0])
        returns.append(total[starts & (data.weights[:, step] > 0)])
    deviation = float(torch.cat(returns).std(correction=0))
    return deviation if deviation > 0 else 1.0


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean over the steps that count; 0 if none does."""
    return values.where(counted, 0.0).sum() / counted.sum().clamp(min=1)
