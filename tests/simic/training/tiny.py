"""A task small enough for whole rounds in a test, and runners of it."""

from dataclasses import replace

import torch
from torch import Tensor

from esper.leyline import head_preset
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.groups import Groups
from esper.simic.training.seeds import host_seed
from esper.tamiyo import Policy, View
from esper.tolaria import HostFleet, Task, TaskRegistry, get_task

NAME = "digits_tiny"


def tiny_task() -> Task:
    """`digits_blind` with steps of two minibatches."""
    if NAME not in TaskRegistry.names():
        TaskRegistry.register(
            replace(get_task("digits_blind"), name=NAME, steps=12, batches_per_step=2, batch=16, calibration_size=64)
        )
    return get_task(NAME)


def make_runner(groups: int = 3, members: int = 2, preset: str = "core", *, sensing: bool = True) -> EpisodeRunner:
    """A fleet of the tiny task."""
    shape = Groups(groups, members)
    return EpisodeRunner(HostFleet(tiny_task(), shape.hosts), shape, head_preset(preset), sensing=sensing)


def play(runner: EpisodeRunner, policy: Policy, rng_seed: int = 0) -> tuple[list[View], list[Tensor], list[StepResult]]:
    """One episode under a policy: what it saw, did and got."""
    seeds = [host_seed("evaluation", rng_seed, group) for group in range(runner.groups.count)]
    draws = action_draws(rng_seed, 0, runner.groups.grown, runner.fleet.task.steps, len(runner.table))
    runner.begin(seeds)
    memory = policy.initial_memory([seed for seed in seeds for _ in range(runner.groups.members)])
    views, actions, results = [], [], []
    for step in range(runner.fleet.task.steps):
        views.append(runner.view())
        chosen, memory = policy.act(views[-1], memory, draws[step])
        actions.append(chosen)
        results.append(runner.step(chosen))
    return views, actions, results


def varies(columns: Tensor) -> Tensor:
    """(steps × envs, columns) → which columns are not constant."""
    return (columns.amax(0) - columns.amin(0)) > torch.finfo(torch.float32).eps
