"""Policies on hosts that none of them has seen: the same hosts for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import HeadPreset
from esper.leyline.progress import Advance
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.groups import Groups
from esper.simic.training.learned import LearnedPolicy
from esper.simic.training.seeds import Purpose, host_seed
from esper.tamiyo.policy import Policy
from esper.tolaria import HostFleet, Task

AT_ONCE = 32
"""Hosts per fleet, beside their controls."""


@dataclass(frozen=True)
class Result:
    """One policy on all hosts, lists over hosts."""

    objective: list[float]
    accuracy: list[float]
    control_accuracy: list[float]
    added_params: list[int]
    commits: list[list[str]]
    """`slot/blueprint` of every fossil"""


class Trajectory(NamedTuple):
    """One batch of hosts."""

    accuracy: Tensor
    control: Tensor
    added: Tensor
    commits: list[list[str]]


def evaluate(
    task: Task,
    policies: dict[str, Policy],
    hosts: int,
    rng_seed: int,
    preset: HeadPreset,
    *,
    final: bool = False,
    rho: float = 2.0,
    sensing: bool = True,
    fleet: HostFleet | None = None,
    advance: Advance | None = None,
) -> dict[str, Result]:
    """Let each policy grow the same hosts. Groups are one host and its control; draws depend on the host alone.

    `final` takes hosts of the final range and scores them on test images.
    """
    size = min(hosts, AT_ONCE)
    groups = Groups(size, 1)
    fleet = fleet if fleet is not None else HostFleet(task, groups.hosts)
    runner = EpisodeRunner(fleet, groups, preset, sensing=sensing)
    runner.final = final
    found: dict[str, list[Trajectory]] = {name: [] for name in policies}
    for begin in range(0, hosts, size):
        numbers = [min(index, hosts - 1) for index in range(begin, begin + size)]  # the last batch is filled up
        purpose: Purpose = "final" if final else "evaluation"
        seeds = [host_seed(purpose, rng_seed, number) for number in numbers]
        draws = torch.cat(
            [action_draws(rng_seed, number, 1, task.steps, len(runner.table), purpose) for number in numbers], 1
        )
        for name, policy in policies.items():
            found[name].append(run_policy(runner, policy, seeds, draws))
            if advance is not None:
                advance(1, name)
    return {name: _result(task, parts, hosts, rho) for name, parts in found.items()}


def run_policy(runner: EpisodeRunner, policy: Policy, seeds: list[int], draws: Tensor) -> Trajectory:
    """One episode of these hosts under a policy."""
    runner.begin(seeds)
    memory = policy.initial_memory(seeds)
    result = None
    for step in range(runner.fleet.task.steps):
        actions, memory = policy.act(runner.view(), memory, draws[step].to(runner.fleet.device))
        result = runner.step(actions)
        if isinstance(policy, LearnedPolicy):
            memory = policy.forget(memory, result.panics)
    assert result is not None
    assert result.hardened_accuracy is not None
    assert result.hardened_control is not None
    return Trajectory(result.hardened_accuracy, result.hardened_control, result.fossil_parameters, _fossils(runner))


def _fossils(runner: EpisodeRunner) -> list[list[str]]:
    return [
        [
            f"{slot_id}/{state.blueprint}"
            for slot_id, state in runner.fleet.states[env].items()
            if state.stage.name == "FOSSILIZED"
        ]
        for env in runner.groups.envs
    ]


def _result(task: Task, parts: Sequence[Trajectory], hosts: int, rho: float) -> Result:
    accuracy, control, added = (
        torch.cat([getattr(part, name) for part in parts])[:hosts].double().cpu()
        for name in ("accuracy", "control", "added")
    )
    rent = rho * torch.log2(1 + added / task.host_parameters)
    return Result(
        (accuracy - control - rent).tolist(),
        accuracy.tolist(),
        control.tolist(),
        [int(count) for count in added.tolist()],
        [commit for part in parts for commit in part.commits][:hosts],
    )
