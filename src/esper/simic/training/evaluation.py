"""Policies on hosts that none of them has seen: the same hosts for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import HeadPreset, SeedStage
from esper.leyline.progress import Advance
from esper.simic.training.collect import action_draws
from esper.simic.training.costs import CostMeter, Structure
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.fleets import growth_fleet
from esper.simic.training.groups import Groups
from esper.simic.training.learned import LearnedPolicy
from esper.simic.training.seeds import Purpose, host_seed
from esper.tamiyo.policy import Policy
from esper.tolaria import HostFleet, Task

AT_ONCE = 32
"""Hosts per fleet, beside their controls."""
RHO = 2.0
"""Rent in points per doubling of the host."""
OTHER_RHOS = (1.0, 4.0)
"""At which objectives are scored once more: does a ranking hang on the price?"""


class Fossil(NamedTuple):
    """A seed that was committed."""

    slot_id: str
    blueprint: str
    style: str = "add"
    alpha: float = 1.0

    @property
    def name(self) -> str:
        """`slot/blueprint`."""
        return f"{self.slot_id}/{self.blueprint}"

    @classmethod
    def named(cls, name: str) -> "Fossil":
        """The fossil of a name, blended in by addition in full."""
        slot_id, blueprint = name.split("/")
        return cls(slot_id, blueprint)


@dataclass(frozen=True)
class Result:
    """One policy on all hosts, lists over hosts."""

    objective: list[float]
    accuracy: list[float]
    """Of the hardened hosts, percent"""
    control_accuracy: list[float]
    added_params: list[int]
    fossils: list[list[Fossil]]
    work: dict[str, list[float]] = field(default_factory=dict)
    """By kind of pass, in units of the plain host's own training"""
    objective_at: dict[str, list[float]] = field(default_factory=dict)
    """Scored with another ρ, by its value"""

    @property
    def commits(self) -> list[list[str]]:
        """`slot/blueprint` of every fossil."""
        return [[fossil.name for fossil in found] for found in self.fossils]

    @property
    def gain(self) -> list[float]:
        """Points over the control."""
        return [mine - other for mine, other in zip(self.accuracy, self.control_accuracy, strict=True)]

    @property
    def cost(self) -> list[float]:
        """Work of the whole episode; empty where it was not counted."""
        return [sum(parts) for parts in zip(*self.work.values(), strict=True)]


class Trajectory(NamedTuple):
    """One batch of hosts."""

    accuracy: Tensor
    control: Tensor
    added: Tensor
    fossils: list[list[Fossil]]
    work: dict[str, list[float]]


class UnseenHosts:
    """The hosts of an evaluation, and a fleet that carries them batch by batch, each beside its control."""

    def __init__(
        self,
        task: Task,
        hosts: int,
        rng_seed: int,
        preset: HeadPreset,
        *,
        final: bool = False,
        rho: float = RHO,
        sensing: bool = True,
        fleet: HostFleet | None = None,
        device: str = "cpu",
        data_dir: Path | None = None,
    ) -> None:
        """`final` takes hosts of the final range and scores them on test images."""
        self.task, self.hosts, self.rng_seed, self.final, self.rho = task, hosts, rng_seed, final, rho
        self.purpose: Purpose = "final" if final else "evaluation"
        self.seeds = host_seeds(hosts, rng_seed, final=final)
        groups = Groups(min(hosts, AT_ONCE), 1)
        self.fleet = fleet if fleet is not None else growth_fleet(task, groups.hosts, device, data_dir=data_dir)
        self.runner = EpisodeRunner(self.fleet, groups, preset, sensing=sensing)
        self.runner.final = final
        self.meter = CostMeter(self.fleet, final=final)

    def batches(self, size: int) -> list[list[int]]:
        """Numbers of the hosts that are run together; the last batch is filled up with the last host."""
        starts = range(0, self.hosts, size)
        return [[min(number, self.hosts - 1) for number in range(start, start + size)] for start in starts]

    def grow(self, policy: Policy, advance: Advance | None = None, words: str = "") -> Result:
        """Let a policy grow all hosts. What it draws depends on the host alone."""
        runner, steps = self.runner, self.task.steps
        parts = []
        for numbers in self.batches(runner.groups.count):
            heads = len(runner.table)
            draws = [action_draws(self.rng_seed, number, 1, steps, heads, self.purpose) for number in numbers]
            seeds = [self.seeds[number] for number in numbers]
            parts.append(run_policy(runner, policy, seeds, torch.cat(draws, 1), self.meter))
            if advance is not None:
                advance(1, words)
        return self.result(parts)

    def result(self, parts: Sequence[Trajectory]) -> Result:
        """All batches as one; what only filled the last one up is left out."""
        accuracy, control, added = (
            torch.cat([getattr(part, name) for part in parts])[: self.hosts].double().cpu()
            for name in ("accuracy", "control", "added")
        )
        doublings = torch.log2(1 + added / self.task.host_parameters)
        return Result(
            (accuracy - control - self.rho * doublings).tolist(),
            accuracy.tolist(),
            control.tolist(),
            [int(count) for count in added.tolist()],
            [fossils for part in parts for fossils in part.fossils][: self.hosts],
            {name: [cost for part in parts for cost in part.work[name]][: self.hosts] for name in parts[0].work},
            {f"{rho:g}": (accuracy - control - rho * doublings).tolist() for rho in OTHER_RHOS},
        )


def host_seeds(hosts: int, rng_seed: int, *, final: bool = False) -> list[int]:
    """Which hosts an evaluation takes."""
    return [host_seed("final" if final else "evaluation", rng_seed, number) for number in range(hosts)]


def evaluate(
    task: Task,
    policies: dict[str, Policy],
    hosts: int,
    rng_seed: int,
    preset: HeadPreset,
    *,
    final: bool = False,
    rho: float = RHO,
    sensing: bool = True,
    fleet: HostFleet | None = None,
    advance: Advance | None = None,
) -> dict[str, Result]:
    """Let each policy grow the same hosts, one policy after the other."""
    unseen = UnseenHosts(task, hosts, rng_seed, preset, final=final, rho=rho, sensing=sensing, fleet=fleet)
    return {name: unseen.grow(policy, advance, name) for name, policy in policies.items()}


def run_policy(
    runner: EpisodeRunner, policy: Policy, seeds: list[int], draws: Tensor, meter: CostMeter | None = None
) -> Trajectory:
    """One episode of these hosts under a policy."""
    meter = meter if meter is not None else CostMeter(runner.fleet, final=runner.final)
    runner.begin(seeds)
    _count_begin(runner, meter)
    memory = policy.initial_memory(seeds)
    result = None
    for step in range(runner.fleet.task.steps):
        actions, memory = policy.act(runner.view(), memory, draws[step].to(runner.fleet.device))
        result = runner.step(actions)
        # As it was trained and measured; of a host that panicked, as it was put back.
        _count_step(runner, meter, Structure.of(result.slots.stage, result.slots.blueprint))
        if isinstance(policy, LearnedPolicy):
            memory = policy.forget(memory, result.panics)
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
