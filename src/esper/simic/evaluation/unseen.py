"""Policies on hosts that none of them has seen: the same hosts for each, side by side, beside one control."""

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.kasmina.slot import Isolation
from esper.leyline import OTHER_RHOS, RHO, BadValueError, HeadPreset, SeedStage, objective
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.evaluation.costs import CostMeter, Structure
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups, Purpose, growth_fleet, host_seed
from esper.tamiyo import ActionTable
from esper.tamiyo.policy import Policy, PolicyState, PolicyView
from esper.tolaria import HostFleet, Task

AT_ONCE = 64
"""Hosts per fleet, controls included."""
MOST_POLICIES = 15
"""Side by side: a fleet still carries four hosts."""

Tree = TypeVar("Tree")


class Trajectory(NamedTuple):
    """Some envs; lists and tensors over them."""

    accuracy: Tensor
    control: Tensor
    added: Tensor
    fossils: list[list[Fossil]]
    work: dict[str, list[float]]

    def every(self, width: int, place: int) -> "Trajectory":
        """Of every `width` envs the one at this place."""
        rows = slice(place, None, width)
        work = {name: values[rows] for name, values in self.work.items()}
        return Trajectory(self.accuracy[rows], self.control[rows], self.added[rows], self.fossils[rows], work)


class SideBySide:
    """Several policies in one fleet: of the envs of each group, every policy has one."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        if any(policy.table != self.table for policy in policies):
            raise BadValueError("policies side by side need the same heads")

    @property
    def table(self) -> ActionTable:
        """The heads of their actions."""
        return self.policies[0].table

    def initial_state(self, seeds: list[int]) -> list[PolicyState]:
        """Each policy's own."""
        width = len(self.policies)
        return [policy.initial_state(seeds[place::width]) for place, policy in enumerate(self.policies)]

    def act(
        self, view: PolicyView, hidden_state: list[PolicyState], uniform: Tensor
    ) -> tuple[Tensor, list[PolicyState]]:
        """Actions (n, heads): each policy is shown its own envs and no others."""
        actions, hidden_states = torch.zeros_like(uniform, dtype=torch.long), []
        for place, policy in enumerate(self.policies):
            rows = self._rows(place)
            actions[rows], carried = policy.act(_rows_of(view, rows), hidden_state[place], uniform[rows])
            hidden_states.append(carried)
        return actions, hidden_states

    def forget(self, hidden_state: list[PolicyState], who: Tensor) -> list[PolicyState]:
        """Empty the memories of the envs (n,) bool that begin a new segment."""
        return [
            policy.forget(carried, who[self._rows(place)]) if isinstance(policy, LearnedPolicy) else carried
            for place, (policy, carried) in enumerate(zip(self.policies, hidden_state, strict=True))
        ]

    def _rows(self, place: int) -> slice:
        return slice(place, None, len(self.policies))


def _rows_of(tree: Tree, rows: slice) -> Tree:
    """The same tuples and mappings, with these rows of every tensor."""
    found: Any = tree  # one level at a time
    if isinstance(tree, Tensor):
        found = tree[rows]
    elif isinstance(tree, tuple):
        found = type(tree)(*(_rows_of(part, rows) for part in tree))
    elif isinstance(tree, Mapping):
        found = {name: _rows_of(part, rows) for name, part in tree.items()}
    same: Tree = found
    return same


class EvaluationHosts:
    """The hosts of an evaluation, and a fleet that carries some at a time, each beside its control."""

    def __init__(
        self,
        task: Task,
        hosts: int,
        rng_seed: int,
        preset: HeadPreset,
        *,
        final: bool = False,
        rho: float = RHO,
        isolation: Isolation = "shadow",
        device: str = "cpu",
        data_dir: Path | None = None,
    ) -> None:
        """`final` takes hosts of the final range and scores them on test images."""
        self.task, self.rng_seed, self.preset, self.final, self.rho = task, rng_seed, preset, final, rho
        self.isolation: Isolation = isolation
        self.device = device
        self.purpose: Purpose = "final" if final else "evaluation"
        self.numbers, self._most = range(hosts), hosts
        self.seeds = host_seeds(hosts, rng_seed, final=final)
        self.data = task.load_batches(data_dir, device)
        self._runners: dict[Groups, tuple[EpisodeRunner, CostMeter]] = {}

    @property
    def hosts(self) -> int:
        """How many."""
        return len(self.numbers)

    def part(self, hosts: range) -> "EvaluationHosts":
        """Some of them, with the same fleets."""
        some = copy(self)
        some.numbers, some.seeds = self.numbers[hosts.start : hosts.stop], self.seeds[hosts.start : hosts.stop]
        return some

    def at_once(self, policies: int) -> int:
        """How many hosts a fleet carries for so many policies."""
        return max(1, min(self._most, AT_ONCE // (policies + 1)))

    def open(self, policies: int = 1) -> tuple[EpisodeRunner, CostMeter]:
        """A fleet of as many hosts as it carries; the last one is kept, for fleets cost memory and CUDA graphs."""
        groups = Groups(self.at_once(policies), policies)
        if groups not in self._runners:
            self._runners.clear()
            fleet = growth_fleet(self.task, groups.hosts, self.device, batches=self.data, isolation=self.isolation)
            runner = EpisodeRunner(fleet, groups, self.preset)
            runner.final = self.final
            self._runners[groups] = runner, CostMeter(fleet, final=self.final)
        return self._runners[groups]

    def parts(self, size: int) -> list[list[int]]:
        """Places of the hosts that are run together; the last part is filled up with the last host."""
        starts = range(0, self.hosts, size)
        return [[min(place, self.hosts - 1) for place in range(start, start + size)] for start in starts]

    def draws(self, places: Sequence[int], heads: int) -> Tensor:
        """(steps, hosts, heads): all the chance that a policy has; it depends on the host alone."""
        numbers = [self.numbers[place] for place in places]
        streams = [action_draws(self.rng_seed, n, 1, self.task.steps, heads, self.purpose) for n in numbers]
        return torch.cat(streams, 1)

    def grow(self, policies: Sequence[Policy]) -> list[Result]:
        """Let each of these policies grow all hosts; the same results as one by one."""
        runner, meter = self.open(len(policies))
        parts: list[list[Trajectory]] = [[] for _ in policies]
        for places in self.parts(runner.groups.count):
            draws = self.draws(places, len(runner.table)).repeat_interleave(len(policies), 1)
            together = run_policy(runner, SideBySide(policies), [self.seeds[place] for place in places], draws, meter)
            for place, trajectories in enumerate(parts):
                trajectories.append(together.every(len(policies), place))
        return [self.result(trajectories) for trajectories in parts]

    def result(self, parts: Sequence[Trajectory]) -> Result:
        """All batches as one; what only filled the last one up is left out."""
        accuracy, control, added = (
            torch.cat([getattr(part, name) for part in parts])[: self.hosts].double().cpu()
            for name in ("accuracy", "control", "added")
        )
        gain, host = accuracy - control, self.task.host_parameters
        return Result(
            objective(gain, added, host, self.rho).tolist(),
            accuracy.tolist(),
            control.tolist(),
            [int(count) for count in added.tolist()],
            [fossils for part in parts for fossils in part.fossils][: self.hosts],
            {name: [cost for part in parts for cost in part.work[name]][: self.hosts] for name in parts[0].work},
            {f"{rho:g}": objective(gain, added, host, rho).tolist() for rho in OTHER_RHOS},
        )


def host_seeds(hosts: int, rng_seed: int, *, final: bool = False) -> list[int]:
    """Which hosts an evaluation takes."""
    return [host_seed("final" if final else "evaluation", rng_seed, number) for number in range(hosts)]


def run_policy(
    runner: EpisodeRunner, policy: Policy, seeds: list[int], draws: Tensor, meter: CostMeter | None = None
) -> Trajectory:
    """One episode of these hosts, one per group, under a policy; `draws` (steps, grown envs, heads)."""
    meter = meter if meter is not None else CostMeter(runner.fleet, final=runner.final)
    runner.begin(seeds)
    _count_begin(runner, meter)
    hidden_state = policy.initial_state([seed for seed in seeds for _ in range(runner.groups.members)])
    result = None
    for step in range(runner.fleet.task.steps):
        actions, hidden_state = policy.act(runner.view(), hidden_state, draws[step].to(runner.fleet.device))
        result = runner.step(actions)
        # As it was trained and measured; of a host that panicked, as it was put back.
        _count_step(runner, meter, Structure.of(result.slots.stage, result.slots.blueprint))
        if isinstance(policy, LearnedPolicy | SideBySide):
            hidden_state = policy.forget(hidden_state, result.panics)
    assert result is not None
    assert result.hardened_accuracy is not None
    assert result.hardened_control is not None
    fossils = [fossils_of(runner.fleet, env) for env in runner.groups.envs]
    return Trajectory(
        result.hardened_accuracy, result.hardened_control, result.fossil_parameters, fossils, meter.cost()
    )


def _structure(runner: EpisodeRunner) -> Structure:
    states = [runner.fleet.states[env] for env in runner.groups.envs]
    return Structure.of_states(states, runner.slots.blueprint_names)


def _count_begin(runner: EpisodeRunner, meter: CostMeter) -> None:
    """Before the first step: a validation and a probe of the bare hosts."""
    meter.begin(runner.groups.grown)
    bare = _structure(runner)
    meter.measure(bare)
    meter.probe(bare)


def _count_step(runner: EpisodeRunner, meter: CostMeter, structure: Structure) -> None:
    meter.train(structure)
    meter.measure(structure)
    if runner.done:
        meter.harden(structure)
    else:
        meter.probe(_structure(runner))


def fossils_of(fleet: HostFleet, env: int) -> list[Fossil]:
    """What one env has committed."""
    return [
        Fossil(slot_id, str(state.blueprint), state.style, state.alpha)
        for slot_id, state in fleet.states[env].items()
        if state.stage is SeedStage.FOSSILIZED
    ]
