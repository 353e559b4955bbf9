"""A trained agent as a growth policy, and policies in files.

A policy file holds what acting needs (heads, columns, network, weights, statistics of observations) and the critic with
its scale, so that training can continue from it. It does not say how the policy was made.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import CheckpointError, SlotConfig, head_preset
from esper.leyline.records import decode, encode
from esper.simic.agent.checkpoint import check_tensors, policy_tensors, restore_policy
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.storage.stored import checkpoint_errors
from esper.storage.tensor_files import FileFormat, read_header, read_tensor_file, write_tensor_file
from esper.tamiyo import ActionTable, Decision, FactoredRecurrentActorCritic, NetworkConfig, ObservationLayout
from esper.tamiyo.memory import HiddenState
from esper.tamiyo.policy import PolicyView
from esper.tamiyo.translation import Translation, adapt

POLICY_FILE = FileFormat("esper-policy", 1, "policy file")


class LearnedPolicy:
    """Samples from the agent's policy without exploration, or takes the likeliest choices."""

    def __init__(self, agent: PPOAgent, slots: SlotConfig, *, greedy: bool = False) -> None:
        """`agent` is for as many slots as the hosts have; it may know other blueprints."""
        self.agent, self.greedy = agent, greedy
        self.translation = Translation(slots, agent.layout)
        self.log_probs = torch.zeros(0, len(agent.table))  # (n, heads) of the last actions; 0 if they are greedy
        self.followed = 0  # envs for which `decision` has the probabilities of all choices
        self.decision: Decision | None = None  # the last one, with its own indices of blueprints

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""
        return self.agent.table

    def initial_state(self, seeds: list[int]) -> HiddenState:
        return self.agent.network.initial_state(len(seeds))

    def act(self, view: PolicyView, hidden_state: HiddenState, uniform: Tensor) -> tuple[Tensor, HiddenState]:
        # From the policy's own columns: one trained without sensing must not see what others sense.
        observations = self.agent.normalise(self.translation.features(view.signals))
        masks = self.translation.masks(view.masks)
        decision, _, hidden_state = self.agent.act(
            observations, masks, hidden_state, uniform=uniform, greedy=self.greedy, followed=self.followed
        )
        self.decision = decision
        self.log_probs = torch.zeros_like(decision.log_probs) if self.greedy else decision.log_probs
        return self.translation.actions(decision.actions, self.agent.table), hidden_state

    def forget(self, hidden_state: HiddenState, envs: Tensor) -> HiddenState:
        """Reset the hidden state of the envs (n,) bool that start a new sequence."""
        return forget(hidden_state, envs)


def forget(hidden_state: HiddenState, envs: Tensor) -> HiddenState:
    """The hidden state, reset for envs (n,) bool."""
    return hidden_state[0].where(~envs[:, None], 0.0), hidden_state[1].where(~envs[:, None], 0.0)


@dataclass(frozen=True)
class SavedPolicy:
    """A policy without its tensors."""

    preset: str
    table: ActionTable
    layout: ObservationLayout
    network: NetworkConfig
    normalise_observations: bool


def write_policy(path: Path, agent: PPOAgent, preset: str) -> None:
    """Write the policy of an agent as one file."""
    config = agent.config
    saved = SavedPolicy(preset, agent.table, agent.layout, config.network, config.normalise_observations)
    write_tensor_file(path, POLICY_FILE, encode(saved), policy_tensors(agent))


def read_policy(path: Path, *, device: torch.device | str = "cpu") -> tuple[PPOAgent, str]:
    """The agent of a policy file, with frozen statistics, and its preset. Everything is checked before it is built."""
    content, tensors = read_tensor_file(path, POLICY_FILE)
    with checkpoint_errors(str(path)):
        saved: SavedPolicy = decode(SavedPolicy, content, "policy")
        head_preset(saved.preset)
        config = PPOConfig(network=saved.network, normalise_observations=saved.normalise_observations)
        with torch.device("meta"):  # a forged file may describe a network that no memory holds
            table = ActionTable(saved.table.heads)  # a copy, because a table caches a tensor
            network = FactoredRecurrentActorCritic(table, saved.layout, saved.network).state_dict()
        named = {name: tensor for name, tensor in tensors.items() if name.startswith("network.")}
        check_tensors(named, {f"network.{name}": tensor for name, tensor in network.items()}, str(path))
        tasks = len(tensors["returns.mean"]) if "returns.mean" in tensors else 1
        agent = PPOAgent(saved.table, saved.layout, config, tasks=tasks, device=device)
        check_tensors(tensors, policy_tensors(agent), str(path))
        restore_policy(agent, tensors)
        agent.observations.freeze()
    return agent, saved.preset


def read_preset(path: Path) -> str:
    """The head preset of a policy file."""
    content = read_header(path, POLICY_FILE)
    with checkpoint_errors(str(path)):
        saved: SavedPolicy = decode(SavedPolicy, content, "policy")
    return saved.preset


def fit_policy(agent: PPOAgent, slots: SlotConfig, *, greedy: bool = False) -> LearnedPolicy:
    """The policy of an agent for hosts with these slots: of any number, with blueprints that it knows by name."""
    table, layout = adapt(agent.table, agent.layout, len(slots))
    if table != agent.table:
        adapted = PPOAgent(table, layout, agent.config, total_updates=agent.total_updates, device=agent.device)
        adapted.network.load_state_dict(agent.network.state_dict())
        adapted.observations.statistics.load_state_dict(agent.observations.statistics.state_dict())
        agent = adapted
    return LearnedPolicy(agent, slots, greedy=greedy)


def check_heads(agent: PPOAgent, table: ActionTable, where: Path) -> None:
    """Raise unless an agent has the heads of this table. The numbers of slots and blueprints may differ."""
    free = ("pointer", "offer")
    own, needed = (
        {head.name: 0 if head.kind in free else head.size for head in each.heads} for each in (agent.table, table)
    )
    if list(own.items()) != list(needed.items()):
        raise CheckpointError(
            f"{where}: the policy has another head preset, with heads {list(own)} instead of {list(needed)}; "
            f"use --preset {'full' if len(own) > len(needed) else 'core'}"
        )


def check_columns(agent: PPOAgent, layout: ObservationLayout, where: Path) -> None:
    """Raise unless an agent sees exactly these columns, blueprints included."""
    own, needed = agent.layout.column_names, layout.column_names
    if own != needed:
        unknown = [name for name in own if name not in needed]
        missing = [name for name in needed if name not in own]
        raise CheckpointError(
            f"{where}: the policy sees other columns: {unknown[:5]} are unknown here, it lacks {missing[:5]}"
        )
