"""A trained agent as a policy among others, and as the beginning of another."""

from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path

from torch import Tensor

from esper.leyline import CheckpointError
from esper.simic.agent import PPOAgent, load_agent
from esper.simic.training.run_folder import RunFolder
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
        """An empty memory per env."""
        return self.agent.network.initial_state(len(seeds))

    def act(self, view: PolicyView, hidden_state: HiddenState, uniform: Tensor) -> tuple[Tensor, HiddenState]:
        """Actions (n, heads)."""
        # By its own columns: a policy that was trained without sensing is not shown what others sense.
        seen = self.agent.normalise(signals_to_features(view.signals, self.agent.layout))
        decision, _, hidden_state = self.agent.act(seen, view.masks, hidden_state, uniform=uniform, greedy=self.greedy)
        return decision.actions, hidden_state

    def forget(self, hidden_state: HiddenState, who: Tensor) -> HiddenState:
        """Empty the memory of the envs (n,) bool that begin a new segment."""
        return hidden_state[0].where(~who[:, None], 0.0), hidden_state[1].where(~who[:, None], 0.0)


def load_policy(
    folder: Path, table: ActionTable, layout: ObservationLayout, *, greedy: bool = False, device: str = "cpu"
) -> LearnedPolicy:
    """The policy of a run's checkpoint, for hosts with these heads and columns; their slots may be others."""
    agent, _ = load_agent(folder, device=device)
    layout = replace(layout, critic=agent.layout.critic)  # who acts has no use for the critic
    _check_fits(agent, table, layout, folder)
    if agent.table != table or agent.layout != layout:
        moved = PPOAgent(table, layout, agent.config, total_updates=agent.total_updates, device=device)
        moved.network.load_state_dict(agent.network.state_dict())
        moved.observations.statistics.load_state_dict(agent.observations.statistics.state_dict())
        agent = moved
    return LearnedPolicy(agent, greedy=greedy)


def begin_with(agent: PPOAgent, run: Path) -> None:
    """Give a new agent what the last checkpoint of a run has learnt: weights, and the statistics of observations, which
    stay as they are, as they do wherever a policy that was trained is used."""
    folder = RunFolder.last_checkpoint(run)
    if folder is None:
        raise CheckpointError(f"{run} has no checkpoint to start from; name a run with at least one complete round")
    learned, _ = load_agent(folder, device=str(agent.device))
    _check_fits(learned, agent.table, agent.layout, folder)
    ours, its = (asdict(one.config.network) for one in (agent, learned))
    if differing := {name: (its[name], ours[name]) for name in ours if its[name] != ours[name]}:
        raise CheckpointError(f"{folder}: a network of another make, (its, this run's): {differing}; make them alike")
    agent.network.load_state_dict(learned.network.state_dict())
    agent.observations.statistics.load_state_dict(learned.observations.statistics.state_dict())
    agent.observations.frozen = True
    mine, theirs = agent.returns.statistics, learned.returns.statistics
    if len(mine.mean) == len(theirs.mean):  # with more tasks, or fewer, the critic finds its scale anew
        mine.load_state_dict(theirs.state_dict())


def _check_fits(agent: PPOAgent, table: ActionTable, layout: ObservationLayout, folder: Path) -> None:
    if _columns(agent.layout) != _columns(layout):
        unknown, lacking = (
            [name for name in one if name not in other]
            for one, other in permutations((agent.layout.column_names, layout.column_names))
        )
        raise CheckpointError(
            f"{folder}: a policy that sees other columns: {unknown[:5]} are not known here, it lacks {lacking[:5]}; "
            f"it was trained with {agent.layout.blueprints} blueprints, here are {layout.blueprints}"
        )
    if _heads(agent.table) != _heads(table):
        its, wanted = ([name for name, _ in _heads(one)] for one in (agent.table, table))
        raise CheckpointError(
            f"{folder}: a policy of another head preset: its heads are {its}, wanted are {wanted}; "
            f"give it hosts of its own (--preset {'full' if len(its) > len(wanted) else 'core'})"
        )


def _columns(layout: ObservationLayout) -> tuple[tuple[str, ...], int]:
    return layout.column_names, layout.blueprints


def _heads(table: ActionTable) -> list[tuple[str, int]]:
    """Names and sizes; the number of slots is free."""
    return [(head.name, 0 if head.kind == "pointer" else head.size) for head in table.heads]
