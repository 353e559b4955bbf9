"""Imitation: a policy learns to do what recorded policies did, step by step, each step with a weight.

The loss of a step is the cross-entropy of its action, over the heads that it used and that had several legal choices:

    L = −Σ_i w_i Σ_h log π_h(a_ih | s_i, earlier heads) / Σ_i w_i

The same loss extracts a policy in implicit Q-learning, with weights from advantages.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole
from esper.leyline.progress import Advance, ignore
from esper.simic.agent import NotFiniteError, PPOAgent, PPOConfig
from esper.simic.offline.networks import windowed
from esper.simic.offline.transitions import PackedSteps, Transitions
from esper.tamiyo import ActionTable, Decision, NetworkConfig, ObservationLayout

CHUNK = 8192  # steps whose statistics are computed at once
EPISODES_AT_ONCE = 256  # episodes that are judged at once


@dataclass(frozen=True)
class ImitationConfig:
    """Settings of imitation."""

    network: NetworkConfig = field(default_factory=windowed)
    """The policy's network; by default it remembers the last four observations, without an LSTM."""
    epochs: int = 60
    """Passes over the episodes."""
    batch: int = 64
    """Episodes per minibatch."""
    rate: float = 3e-3
    """Adam's learning rate; it falls linearly to a tenth."""
    decay: float = 1e-4
    """Weight decay."""
    clip_norm: float = 0.5
    """Global norm at which gradients are clipped."""
    held_out: float = 0.0
    """Share of the hosts that the policy does not learn from; its accuracy is measured on them."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            require_whole(name, getattr(self, name), 1)
        for name in ("rate", "clip_norm"):
            require_positive(name, getattr(self, name))
        if not 0 <= self.held_out < 1:
            raise BadValueError(f"held_out {self.held_out!r} is not in [0, 1); some hosts must be left to learn from")


class Imitation(NamedTuple):
    """A policy that was learned by imitation, and how well it imitates."""

    agent: PPOAgent
    accuracy: dict[str, float]  # share of decisions, by head, in which the likeliest action agrees with the recorded
    held_out: dict[str, float] | None  # the same on hosts that it did not learn from; None if there are none


def imitation_loss(decision: Decision, weights: Tensor) -> Tensor:
    """The weighted sum of cross-entropies over the steps of a minibatch; weights (steps,)."""
    return -(decision.log_probs.where(decision.decided, 0.0).sum(-1) * weights).sum()


def evaluate_steps(agent: PPOAgent, steps: PackedSteps, *, likeliest: bool = False) -> Decision:
    """The agent's decision in every step: the recorded actions evaluated, or its own `likeliest` ones."""
    core, encoded = agent.network.read(agent.normalise(steps.observations), steps.stretches, steps.n_sequences)
    actions = None if likeliest else steps.actions
    return agent.network.decide(core, encoded, steps.masks, 0.0, actions=actions, measured=False)


def set_statistics(agent: PPOAgent, data: Transitions) -> None:
    """Set the statistics of observations to those of the data, and freeze them. Steps of weight 0 do not count."""
    for some in data.observations[data.weights > 0].split(CHUNK):
        agent.observations.update(some, agent.layout.counted(some))
    agent.observations.freeze()


def new_agent(
    table: ActionTable, layout: ObservationLayout, network: NetworkConfig, data: Transitions, rng_seed: int
) -> PPOAgent:
    """An untrained agent with the statistics of these observations."""
    agent = PPOAgent(table, layout, PPOConfig(network=network), rng_seed=rng_seed)
    set_statistics(agent, data)
    return agent


def imitate(
    data: Transitions,
    table: ActionTable,
    layout: ObservationLayout,
    config: ImitationConfig | None = None,
    *,
    rng_seed: int = 0,
    advance: Advance = ignore,
) -> Imitation:
    """Learn a policy from transitions. `advance` counts epochs."""
    config = config if config is not None else ImitationConfig()
    generator = torch.Generator().manual_seed(rng_seed)
    seen, unseen = divide_hosts(data, config.held_out, generator)
    agent = new_agent(table, layout, config.network, seen, rng_seed)
    fit_actor(agent, seen, config, generator, advance)
    held_out = None if unseen is None else accuracy(agent, unseen)
    return Imitation(agent, accuracy(agent, seen), held_out)


def fit_actor(
    agent: PPOAgent, data: Transitions, config: ImitationConfig, generator: torch.Generator, advance: Advance = ignore
) -> None:
    """Train an agent's policy to imitate the data. `advance` counts epochs."""
    if not float(data.weights.sum()) > 0:
        raise BadValueError("all steps have weight 0, so there is nothing to imitate; give some a positive weight")
    trainer = ActorTrainer(agent, config)
    total = float(data.weights.sum()) / -(-data.n_episodes // config.batch)  # of an average minibatch
    for _ in range(config.epochs):
        for steps in data.minibatches(config.batch, generator):
            trainer.step(steps, steps.weights / total)
        trainer.end_epoch()
        advance(1)


class ActorTrainer:
    """Takes steps of Adam on the imitation loss of an agent's policy; the critic stays as it is."""

    def __init__(self, agent: PPOAgent, config: ImitationConfig) -> None:
        self.agent, self.config = agent, config
        self.weights = [weight for name, weight in agent.network.named_parameters() if not name.startswith("critic")]
        self.optimizer = torch.optim.AdamW(self.weights, lr=config.rate, weight_decay=config.decay)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, config.epochs)

    def step(self, steps: PackedSteps, weights: Tensor) -> float:
        """Learn from a minibatch with these weights (steps,), already normalised; returns its loss."""
        loss = imitation_loss(evaluate_steps(self.agent, steps), weights)
        if not bool(loss.isfinite()):
            raise NotFiniteError(f"the imitation loss is {float(loss.detach())}; check the weights of the steps")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.config.clip_norm)
        self.optimizer.step()
        return float(loss.detach())

    def end_epoch(self) -> None:
        """Lower the learning rate."""
        self.schedule.step()


@torch.no_grad()
def accuracy(agent: PPOAgent, data: Transitions) -> dict[str, float]:
    """By head: the weighted share of decisions in which the agent's likeliest action agrees with the recorded one.

    A head agrees if it and all earlier ones do, because later choices depend on earlier ones. `joint` counts whole
    actions. A head that never decided is omitted.
    """
    names, sequences = ("joint", *agent.table.names), data.sequences()
    right, total = (torch.zeros(len(names), dtype=torch.float64) for _ in range(2))
    for rows in torch.arange(data.n_episodes).split(EPISODES_AT_ONCE):
        steps = data.packed(sequences, rows.tolist())
        recorded = evaluate_steps(agent, steps)
        equal = evaluate_steps(agent, steps, likeliest=True).actions == steps.actions
        agrees = (equal | ~recorded.causal).cummin(-1).values
        decided = torch.cat([recorded.decided.any(-1, keepdim=True), recorded.decided], -1)
        weights = steps.weights[:, None] * decided
        right += (weights * torch.cat([agrees[:, -1:], agrees], -1)).sum(0)
        total += weights.sum(0)
    return {name: float(right[i] / total[i]) for i, name in enumerate(names) if total[i] > 0}


def divide_hosts(
    data: Transitions, held_out: float, generator: torch.Generator
) -> tuple[Transitions, Transitions | None]:
    """Episodes to learn from, and those of the hosts that are held out."""
    groups = data.groups.unique()
    count = round(held_out * len(groups))
    if not count:
        return data, None
    if count == len(groups):
        raise BadValueError(f"held_out {held_out} leaves none of {len(groups)} hosts to learn from")
    chosen = groups[torch.randperm(len(groups), generator=generator)[:count]]
    unseen = torch.isin(data.groups, chosen)
    return data.part((~unseen).nonzero().squeeze(1)), data.part(unseen.nonzero().squeeze(1))
