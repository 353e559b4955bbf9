"""A trained agent as a growth policy."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from esper.leyline import CheckpointError
from esper.simic.agent.checkpoint import load_agent
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo import ActionTable, ObservationLayout, signals_to_features
from esper.tamiyo.network import HiddenState
from esper.tamiyo.policy import PolicyView


class LearnedPolicy:
    """Samples from the agent's policy without exploration, or takes the likeliest choices."""

    def __init__(self, agent: PPOAgent, *, greedy: bool = False) -> None:
        self.agent, self.greedy = agent, greedy

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""
        return self.agent.table

    def initial_state(self, seeds: list[int]) -> HiddenState:
        return self.agent.network.initial_state(len(seeds))

    def act(self, view: PolicyView, hidden_state: HiddenState, uniform: Tensor) -> tuple[Tensor, HiddenState]:
        # From the policy's own columns: one trained without sensing must not see what others sense.
        observations = self.agent.normalise(signals_to_features(view.signals, self.agent.layout))
        decision, _, hidden_state = self.agent.act(
            observations, view.masks, hidden_state, uniform=uniform, greedy=self.greedy
        )
        return decision.actions, hidden_state

    def forget(self, hidden_state: HiddenState, envs: Tensor) -> HiddenState:
        """Reset the hidden state of the envs (n,) bool that start a new sequence."""
        return hidden_state[0].where(~envs[:, None], 0.0), hidden_state[1].where(~envs[:, None], 0.0)


def load_policy(
    folder: Path, table: ActionTable, layout: ObservationLayout, *, greedy: bool = False, device: str = "cpu"
) -> LearnedPolicy:
    """The policy of a checkpoint, for hosts with these heads and columns and any number of slots."""
    agent, _ = load_agent(folder, device=device)
    layout = replace(layout, critic=agent.layout.critic)  # acting does not use the critic
    check_compatible(agent, table, layout, folder)
    if agent.table != table or agent.layout != layout:
        adapted = PPOAgent(table, layout, agent.config, total_updates=agent.total_updates, device=device)
        adapted.network.load_state_dict(agent.network.state_dict())
        adapted.observations.statistics.load_state_dict(agent.observations.statistics.state_dict())
        agent = adapted
    return LearnedPolicy(agent, greedy=greedy)


def check_compatible(agent: PPOAgent, table: ActionTable, layout: ObservationLayout, folder: Path) -> None:
    """Raise unless the agent of a checkpoint fits these heads and columns. The number of slots may differ."""
    columns, expected = agent.layout.column_names, layout.column_names
    if (columns, agent.layout.blueprints) != (expected, layout.blueprints):
        unknown = [name for name in columns if name not in expected]
        missing = [name for name in expected if name not in columns]
        raise CheckpointError(
            f"{folder}: the policy sees other columns: {unknown[:5]} are unknown here, it lacks {missing[:5]}; "
            f"it was trained with {agent.layout.blueprints} blueprints, not {layout.blueprints}"
        )
    sizes, needed = (
        {head.name: 0 if head.kind == "pointer" else head.size for head in each.heads} for each in (agent.table, table)
    )
    if list(sizes.items()) != list(needed.items()):
        raise CheckpointError(
            f"{folder}: the policy has another head preset, with heads {list(sizes)} instead of {list(needed)}; "
            f"use --preset {'full' if len(sizes) > len(needed) else 'core'}"
        )
