"""Imitation: a policy learns to do what recorded policies did, step by step, each step with a weight.

The loss of a step is the cross-entropy of its action, over the heads that it used and that had several legal choices:

    L = −Σ_i w_i Σ_h log π_h(a_ih | s_i, earlier heads) / Σ_i w_i

The same loss extracts a policy in implicit Q-learning, with weights from advantages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ImitationConfig:
    """Settings of imitation."""

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
    """Set the statistics of observations to those of the data, and freeze them."""
    flat = data.observations.flatten(0, 1)
    agent.observations.update(flat, agent.layout.counted(flat))
    agent.observations.freeze()


def imitate(
    data: Transitions,
    table: ActionTable,
    layout: ObservationLayout,
    config: ImitationConfig | None = None,
    *,
    network: NetworkConfig | None = None,
    rng_seed: int = 0,
    advance: Advance = ignore,
) -> Imitation:
    """Learn a policy from transitions. `network`: by default a `PolicyNetwork`. `advance` counts epochs."""
    config = config if config is not None else ImitationConfig()
    generator = torch.Generator().manual_seed(rng_seed)
    seen, unseen = divide_hosts(data, config.held_out, generator)
    agent = PPOAgent(table, layout, PPOConfig(network=windowed() if network is None else network), rng_seed=rng_seed)
    set_statistics(agent, seen)
    fit_actor(agent, seen, config, generator, advance)
    held_out = None if unseen is None else accuracy(agent, unseen)
    return Imitation(agent, accuracy(agent, seen), held_out)


def fit_actor(
    agent: PPOAgent, data: Transitions, config: ImitationConfig, generator: torch.Generator, advance: Advance = ignore
) -> None:
    """Train an agent's policy to imitate the data. `advance` counts epochs."""
    trainer = ActorTrainer(agent, config)
    minibatches = -(-data.n_episodes // config.batch)
    total = float(data.weights.sum()) / minibatches  # per minibatch, whatever its size
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

    `joint` counts whole actions. A head that never decided is omitted.
    """
    steps = data.packed(data.sequences(), range(data.n_episodes))
    decided = evaluate_steps(agent, steps).decided
    equal = evaluate_steps(agent, steps, likeliest=True).actions == steps.actions
    columns: Mapping[str, tuple[Tensor, Tensor]] = {
        "joint": ((equal | ~decided).all(-1), decided.any(-1)),
        **{name: (equal[:, i], decided[:, i]) for i, name in enumerate(agent.table.names)},
    }
    weights = {name: steps.weights * used for name, (_, used) in columns.items()}
    return {
        name: float((weights[name] * right).sum() / weights[name].sum())
        for name, (right, _) in columns.items()
        if float(weights[name].sum()) > 0
    }


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
