"""Episodes of policies, packed into fleets: a group is one host, its members are policies that share one control."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, HeadPreset
from esper.simic.evaluation.costs import CostMeter, Structure
from esper.simic.training.episode import EpisodeRunner, StepResult, play_episode
from esper.simic.training.hosts import Groups, growth_fleet
from esper.simic.training.learned import LearnedPolicy
from esper.tamiyo import ActionTable
from esper.tamiyo.policy import Policy, PolicyState, PolicyView
from esper.tolaria import Task

AT_ONCE = 64
"""Envs per fleet, controls included."""

Candidate = TypeVar("Candidate")
Item = TypeVar("Item")
Tree = TypeVar("Tree")
MakePolicy = Callable[[EpisodeRunner, Sequence[Candidate]], Policy]
"""One policy for a fleet whose groups consist of these candidates."""


class SideBySide:
    """Several policies in one fleet; each controls one env of every group."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        if any(policy.table != self.table for policy in policies):
            raise BadValueError("policies side by side need the same heads")

    @property
    def table(self) -> ActionTable:
        """The heads of their actions."""
        return self.policies[0].table

    def initial_state(self, seeds: list[int]) -> list[PolicyState]:
        """The initial state of each policy."""
        return [policy.initial_state(seeds[self._rows(index)]) for index, policy in enumerate(self.policies)]

    def act(
        self, view: PolicyView, hidden_state: list[PolicyState], uniform: Tensor
    ) -> tuple[Tensor, list[PolicyState]]:
        """Actions (n, heads); each policy sees its own envs only."""
        actions, hidden_states = torch.zeros_like(uniform, dtype=torch.long), []
        for index, policy in enumerate(self.policies):
            rows = self._rows(index)
            actions[rows], following = policy.act(_rows_of(view, rows), hidden_state[index], uniform[rows])
            hidden_states.append(following)
        return actions, hidden_states

    def forget(self, hidden_state: list[PolicyState], envs: Tensor) -> list[PolicyState]:
        """Reset the hidden state of these envs (n,) bool."""
        return [
            policy.forget(state, envs[self._rows(index)]) if isinstance(policy, LearnedPolicy) else state
            for index, (policy, state) in enumerate(zip(self.policies, hidden_state, strict=True))
        ]

    def _rows(self, index: int) -> slice:
        return slice(index, None, len(self.policies))


def _rows_of(tree: Tree, rows: slice) -> Tree:
    """The same tuples and mappings, with these rows of every tensor."""
    part: Any = tree  # one level at a time
    if isinstance(tree, Tensor):
        part = tree[rows]
    elif isinstance(tree, tuple):
        part = type(tree)(*(_rows_of(inner, rows) for inner in tree))
    elif isinstance(tree, Mapping):
        part = {name: _rows_of(inner, rows) for name, inner in tree.items()}
    same: Tree = part
    return same


class PolicyPlayer:
    """A policy in one episode, for `play_episode`: carries its hidden state, gives it its draws, counts the work."""

    def __init__(
        self,
        runner: EpisodeRunner,
        policy: Policy,
        seeds: Sequence[int],
        draws: Tensor | None = None,
        meter: CostMeter | None = None,
    ) -> None:
        """Begin an episode of these hosts, one seed per group. `draws` (steps, grown envs, heads): zeros by default."""
        self.runner, self.policy, self.meter = runner, policy, meter
        groups, steps = runner.groups, runner.fleet.task.steps
        self.draws = torch.zeros((steps, groups.grown, len(runner.table))) if draws is None else draws
        runner.begin(list(seeds))
        if meter is not None:
            meter.begin(groups.envs)
            meter.measure(meter.structure())
            meter.probe(meter.structure())
        self.hidden_state = policy.initial_state([seed for seed in seeds for _ in range(groups.members)])

    def act(self, view: PolicyView) -> Tensor:
        """Actions (n, heads)."""
        uniform = self.draws[view.step].to(self.runner.fleet.device)
        actions, self.hidden_state = self.policy.act(view, self.hidden_state, uniform)
        return actions

    def on_step(self, step: int, view: PolicyView, actions: Tensor, result: StepResult) -> None:
        """Count the step's work; a learned policy forgets what it knew of hosts that panicked."""
        if self.meter is not None:
            # As it was trained and measured; of a host that panicked, as it was restored.
            structure = Structure.of(result.slots.stage, result.slots.blueprint)
            self.meter.train(structure)
            self.meter.measure(structure)
            if self.runner.done:
                self.meter.harden(structure)
            else:
                self.meter.probe(self.meter.structure())
        if isinstance(self.policy, LearnedPolicy | SideBySide):
            self.hidden_state = self.policy.forget(self.hidden_state, result.panics)


class Block(NamedTuple):
    """An episode of some candidates on some hosts, both given by index; envs are ordered host × candidate."""

    candidates: range
    hosts: range
    runner: EpisodeRunner
    result: StepResult
    """Of the last step"""

    def by_host(self, values: Tensor) -> Tensor:
        """(grown envs,) → (hosts, candidates)."""
        return values.view(self.runner.groups.count, -1)[: len(self.hosts), : len(self.candidates)]

    @property
    def rows(self) -> tuple[slice, slice]:
        """Where the block stands in a table (hosts, candidates)."""
        return slice(self.hosts.start, self.hosts.stop), slice(self.candidates.start, self.candidates.stop)


class Arena:
    """Fleets for the episodes of one task: loads the data once, and keeps the last fleet."""

    def __init__(
        self,
        task: Task,
        preset: HeadPreset,
        *,
        final: bool = False,
        isolation: Isolation = "shadow",
        device: str = "cpu",
        data_dir: Path | None = None,
    ) -> None:
        """`final`: hardened hosts are scored on test images."""
        self.task, self.preset, self.final, self.device = task, preset, final, device
        self.isolation: Isolation = isolation
        self.batches = task.load_batches(data_dir, device)
        self._runner: EpisodeRunner | None = None

    def runner(self, groups: Groups) -> EpisodeRunner:
        """A runner of this shape: the last one if it fits, because a new fleet costs memory and CUDA graphs."""
        if self._runner is None or self._runner.groups != groups:
            self._runner = None
            fleet = growth_fleet(self.task, groups.hosts, self.device, batches=self.batches, isolation=self.isolation)
            self._runner = EpisodeRunner(fleet, groups, self.preset)
            self._runner.final = self.final
        return self._runner

    def run(
        self, make_policy: MakePolicy[Candidate], candidates: Sequence[Candidate], seeds: Sequence[int]
    ) -> Iterator[Block]:
        """Run every candidate on every host, block by block, without random draws."""
        candidate_parts = divide(len(candidates), AT_ONCE - 1)
        members = len(candidate_parts[0])
        host_parts = divide(len(seeds), AT_ONCE // (members + 1))
        runner = self.runner(groups := Groups(len(host_parts[0]), members))
        for part in candidate_parts:
            policy = make_policy(runner, fill([candidates[index] for index in part], members))
            for hosts in host_parts:
                player = PolicyPlayer(runner, policy, fill([seeds[index] for index in hosts], groups.count))
                yield Block(part, hosts, runner, play_episode(runner, player.act, player.on_step))


def divide(count: int, most: int) -> list[range]:
    """Even parts of at most `most`; the last may be smaller."""
    parts = -(-count // most)
    width = -(-count // parts)
    return [range(begin, min(begin + width, count)) for begin in range(0, count, width)]


def fill(items: Sequence[Item], width: int) -> list[Item]:
    """Repeat the last item up to this width; nobody reads the repeated episodes."""
    return [*items, *[items[-1]] * (width - len(items))]


def hardened(result: StepResult) -> tuple[Tensor, Tensor, Tensor]:
    """At the end of an episode: accuracy of the grown envs, accuracy of their controls, added parameters."""
    assert result.hardened_accuracy is not None
    assert result.hardened_control is not None
    return result.hardened_accuracy, result.hardened_control, result.fossil_parameters
