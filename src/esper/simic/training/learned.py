"""A trained agent as a policy among others."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from esper.leyline import CheckpointError
from esper.simic.agent import PPOAgent, load_agent
from esper.simic.training.runs import EXTRAS
from esper.tamiyo import ActionTable, ObservationLayout, signals_to_features
from esper.tamiyo.network import Memory
from esper.tamiyo.policy import View


class LearnedPolicy:
    """Samples from the agent's policy without exploration, or takes the likeliest choices."""

    def __init__(self, agent: PPOAgent, *, greedy: bool = False) -> None:
        self.agent, self.greedy = agent, greedy

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""
        return self.agent.table

    def initial_memory(self, seeds: list[int]) -> Memory:
        """An empty memory per env."""
        return self.agent.network.initial_memory(len(seeds))

    def act(self, view: View, memory: Memory, uniform: Tensor) -> tuple[Tensor, Memory]:
        """Actions (n, heads)."""
        # By its own columns: a policy that was trained without sensing is not shown what others sense.
        seen = self.agent.see(signals_to_features(view.signals, self.agent.layout))
        decision, _, memory = self.agent.act(seen, view.masks, memory, uniform=uniform, greedy=self.greedy)
        return decision.actions, memory

    def forget(self, memory: Memory, who: Tensor) -> Memory:
        """Empty the memory of the envs (n,) bool that begin a new segment."""
        return memory[0].where(~who[:, None], 0.0), memory[1].where(~who[:, None], 0.0)


def load_policy(
    folder: Path, table: ActionTable, layout: ObservationLayout, *, greedy: bool = False, device: str = "cpu"
) -> LearnedPolicy:
    """The policy of a run's checkpoint, for hosts with these heads and columns; their slots may be others."""
    agent, _ = load_agent(folder, EXTRAS, device=device)
    layout = replace(layout, critic=agent.layout.critic)  # who acts has no use for the critic
    if _columns(agent.layout) != _columns(layout):
        raise CheckpointError(f"{folder}: a policy that sees other columns than {list(layout.column_names)[:5]} …")
    if _heads(agent.table) != _heads(table):
        raise CheckpointError(f"{folder}: a policy with heads {_heads(agent.table)}; wanted {_heads(table)}")
    if agent.table != table or agent.layout != layout:
        moved = PPOAgent(table, layout, agent.config, total_updates=agent.total_updates, device=device)
        moved.network.load_state_dict(agent.network.state_dict())
        moved.observations.statistics.load_state_dict(agent.observations.statistics.state_dict())
        agent = moved
    return LearnedPolicy(agent, greedy=greedy)


def _columns(layout: ObservationLayout) -> tuple[tuple[str, ...], int]:
    return layout.column_names, layout.blueprints


def _heads(table: ActionTable) -> list[tuple[str, int]]:
    """Names and sizes; the number of slots is free."""
    return [(head.name, 0 if head.kind == "pointer" else head.size) for head in table.heads]
