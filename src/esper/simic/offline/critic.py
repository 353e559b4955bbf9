"""A critic from records: it learns the returns of recorded episodes, before the first round of PPO."""

import torch
from torch import Tensor, nn

from esper.simic.agent import PPOAgent
from esper.simic.offline.transitions import Transitions

EPOCHS, BATCH, RATE = 40, 64, 3e-3  # passes over the episodes, episodes per minibatch, Adam's rate


def returns_to_go(data: Transitions, gamma: float) -> Tensor:
    """(E, T): discounted rewards from each step to the end of its sequence."""
    ends, returns = data.terminated | data.truncated, torch.zeros_like(data.rewards)
    following = torch.zeros(data.n_episodes)
    for step in reversed(range(returns.shape[1])):
        following = data.rewards[:, step] + gamma * following.where(~ends[:, step], 0.0)
        returns[:, step] = following
    return returns


def fit_critic(agent: PPOAgent, data: Transitions, tasks: Tensor, gamma: float, generator: torch.Generator) -> None:
    """Train an agent's critic alone on the returns of episodes (E,) of these tasks (E,), and set its scale by them."""
    returns, tasks = returns_to_go(data, gamma), tasks[:, None].expand(data.rewards.shape)
    agent.returns.update(returns.flatten(), tasks.flatten())
    targets = agent.returns.normalise(returns.flatten(), tasks.flatten())
    weights = [weight for name, weight in agent.network.named_parameters() if name.startswith("critic")]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=agent.config.critic_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS)
    for _ in range(EPOCHS):
        for steps in data.minibatches(BATCH, generator):
            with torch.no_grad():
                core, encoded = agent.network.read(
                    agent.normalise(steps.observations), steps.stretches, steps.n_sequences
                )
            errors = agent.network.value(core, encoded) - targets[steps.cells]
            optimizer.zero_grad()
            errors.square().mean().backward()
            nn.utils.clip_grad_norm_(weights, agent.config.clip_norm)
            optimizer.step()
        schedule.step()
