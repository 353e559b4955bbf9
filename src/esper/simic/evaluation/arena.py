"""Episodes of policies, packed into fleets: a group is one host, its members are policies that share one control."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from esper.kasmina.slot import Isolation
from esper.leyline import HeadPreset
from esper.leyline.progress import Advance, ignore
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.evaluation.costs import CostMeter, Structure
from esper.simic.training.episode import EpisodeRunner, StepResult, play_episode
from esper.simic.training.hosts import Groups, MakeFleet, growth_fleet
from esper.simic.training.tape import EpisodeTape
from esper.tamiyo import ActionTable
from esper.tamiyo.policy import Policy, PolicyState, PolicyView
from esper.tolaria import Task

# Envs per fleet, controls included. Measured: on an H200 256 hosts train 1.5 times as many images a second as 64.
AT_ONCE = {"cpu": 64, "cuda": 256}

Candidate = TypeVar("Candidate", bound=Hashable)
Item = TypeVar("Item")
Lineups = Sequence[Sequence[Candidate]]  # the candidates of each host, equally many on all of them
MakePolicy = Callable[[EpisodeRunner, Lineups[Candidate]], Policy]  # for a fleet whose groups are these lineups
Measure = Callable[[EpisodeRunner, StepResult], Tensor]  # figures of every grown env (n, …) at the end of an episode


class SideBySide:
    """Several policies in one fleet; each controls one env of every group."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        self.log_probs = torch.zeros(0)  # (n, heads) of the last actions; 0 for rules

    @property
    def table(self) -> ActionTable:
        """The heads of their actions."""
        return self.policies[0].table

    def initial_state(self, seeds: list[int]) -> list[PolicyState]:
        """One state per policy."""
        return [policy.initial_state(seeds[self._rows(index)]) for index, policy in enumerate(self.policies)]

    def act(
        self, view: PolicyView, hidden_state: list[PolicyState], uniform: Tensor
    ) -> tuple[Tensor, list[PolicyState]]:
        """Actions (n, heads); each policy sees its own envs only."""
        actions, hidden_states = torch.zeros_like(uniform, dtype=torch.long), []
        self.log_probs = torch.zeros_like(uniform)
        for index, policy in enumerate(self.policies):
            rows = self._rows(index)
            actions[rows], following = policy.act(_rows_of(view, rows), hidden_state[index], uniform[rows])
            self.log_probs[rows] = behaviour_log_probs(policy, actions[rows])
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


def behaviour_log_probs(policy: Policy, actions: Tensor) -> Tensor:
    """Log-probs (n, heads) of a policy's last actions (n, heads); 0 for rules."""
    if isinstance(policy, LearnedPolicy | SideBySide):
        return policy.log_probs
    return torch.zeros_like(actions, dtype=torch.float32)


def _rows_of(tree: Any, rows: slice) -> Any:  # Any: one level at a time
    if isinstance(tree, tuple):
        return type(tree)(*(_rows_of(part, rows) for part in tree))
    if isinstance(tree, Mapping):
        return {name: _rows_of(part, rows) for name, part in tree.items()}
    return tree[rows] if isinstance(tree, Tensor) else tree


class PolicyPlayer:
    """A policy in one episode, for `play_episode`: carries its hidden state, gives it its draws, counts the work."""

    def __init__(
        self,
        runner: EpisodeRunner,
        policy: Policy,
        seeds: Sequence[int],
        draws: Tensor | None = None,
        meter: CostMeter | None = None,
        tape: EpisodeTape | None = None,
    ) -> None:
        """Begin an episode of these hosts, one seed per group. `draws` (steps, grown envs, heads): zeros by default."""
        self.runner, self.policy, self.meter, self.tape = runner, policy, meter, tape
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
        """Count the step's work and tape it; a learned policy forgets what it knew of hosts that panicked."""
        if self.meter is not None:
            # As it was trained and measured; of a host that panicked, as it was restored.
            structure = Structure.of(result.slots.stage, result.slots.blueprint)
            self.meter.train(structure)
            self.meter.measure(structure)
            if self.runner.done:
                self.meter.harden(structure)
            else:
                self.meter.probe(self.meter.structure())
        if self.tape is not None:
            self.tape.add(view, actions, result, behaviour_log_probs(self.policy, actions))
        if isinstance(self.policy, LearnedPolicy | SideBySide):
            self.hidden_state = self.policy.forget(self.hidden_state, result.panics)


class Arena:
    """Fleets for the episodes of one task: loads the data once, and keeps the last fleet."""

    def __init__(
        self,
        task: Task,
        preset: HeadPreset,
        final: bool = False,
        isolation: Isolation = "shadow",
        device: str = "cpu",
        data_dir: Path | None = None,
        make_fleet: MakeFleet = growth_fleet,
        at_once: int | None = None,
    ) -> None:
        """`final`: hardened hosts are scored on test images. `at_once`: the most envs of a fleet."""
        self.task, self.preset, self.final, self.device = task, preset, final, device
        self.isolation: Isolation = isolation
        self.batches = task.load_batches(data_dir, device)
        self._make_fleet, self._at_once = make_fleet, envs_at_once(device) if at_once is None else at_once
        self._runner: EpisodeRunner | None = None

    def runner(self, groups: Groups) -> EpisodeRunner:
        """A runner of this shape: the last one if it fits, because a new fleet costs memory and CUDA graphs."""
        if self._runner is None or self._runner.groups != groups:
            self._runner = None
            fleet = self._make_fleet(
                self.task, groups.hosts, self.device, batches=self.batches, isolation=self.isolation
            )
            self._runner = EpisodeRunner(fleet, groups, self.preset)
            self._runner.final = self.final
        return self._runner

    def run(
        self,
        make_policy: MakePolicy[Candidate],
        lineups: Lineups[Candidate],
        seeds: Sequence[int],
        measure: Measure,
        advance: Advance = ignore,
        store: "BlockStore | None" = None,
    ) -> Tensor:
        """Measure the candidates of every host, without random draws: (hosts, candidates, …), float64.

        `store` records the episodes, and gives what was measured of a block that it has.
        """
        candidate_parts = divide(len(lineups[0]), self._at_once - 1)
        members = len(candidate_parts[0])
        host_parts = divide(len(seeds), self._at_once // (members + 1))
        groups = Groups(len(host_parts[0]), members)
        columns = []
        for part in candidate_parts:
            blocks = []
            for hosts in host_parts:
                chosen, own = [[lineups[host][index] for index in part] for host in hosts], [seeds[i] for i in hosts]
                values = None if store is None else store.read(chosen, own)
                if values is None:
                    values = self._play(groups, make_policy, chosen, own, measure, store)
                blocks.append(values)
                advance(len(hosts) * len(part))
            columns.append(torch.cat(blocks))
        return torch.cat(columns, 1)

    def _play(
        self,
        groups: Groups,
        make_policy: MakePolicy[Candidate],
        lineups: Lineups[Candidate],
        seeds: Sequence[int],
        measure: Measure,
        store: "BlockStore | None",
    ) -> Tensor:
        """One episode of a fleet, which may have more groups and members than there are hosts and candidates."""
        runner, members = self.runner(groups), groups.members
        policy = make_policy(runner, fill([fill(lineup, members) for lineup in lineups], groups.count))
        tape = None if store is None else EpisodeTape(runner)
        player = PolicyPlayer(runner, policy, fill(seeds, groups.count), tape=tape)
        values = measure(runner, play_episode(runner, player.act, player.on_step)).double().cpu()
        if store is not None and tape is not None:
            store.write(lineups, seeds, tape, members)
        return values.unflatten(0, (groups.count, members))[: len(seeds), : len(lineups[0])]


class BlockStore(Protocol):
    """Keeps the episodes of a search, block by block."""

    def read(self, lineups: Lineups[Any], seeds: Sequence[int]) -> Tensor | None:  # Any: candidates of any kind
        """What these candidates were measured to be worth on these hosts (hosts, candidates), if it is here."""

    def write(self, lineups: Lineups[Any], seeds: Sequence[int], tape: EpisodeTape, members: int) -> None:
        """Keep a block that was played in a fleet with so many members per group."""


open_arena = lru_cache(maxsize=1)(Arena)  # stays open until another one is needed: a fleet serves job after job


def envs_at_once(device: torch.device | str) -> int:
    """The most envs of a fleet."""
    return AT_ONCE[torch.device(device).type]


def distinct(lineups: Lineups[Candidate]) -> list[Candidate]:
    """All candidates, each once, in order of appearance."""
    return list(dict.fromkeys(candidate for lineup in lineups for candidate in lineup))


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
