"""A task small enough for whole rounds in a test, and runners of it."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import LifecycleOp, head_preset
from esper.simic.training.collect import action_draws
from esper.simic.training.config import TrainConfig, growth_ppo
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import PURPOSES, Groups, Purpose, host_seed
from esper.simic.training.trainer import Trainer
from esper.tamiyo import NetworkConfig, Policy, PolicyView
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


def play(
    runner: EpisodeRunner, policy: Policy, rng_seed: int = 0
) -> tuple[list[PolicyView], list[Tensor], list[StepResult]]:
    """One episode under a policy: what it saw, did and got."""
    seeds = [host_seed("evaluation", rng_seed, group) for group in range(runner.groups.count)]
    positions = [(0, env) for env in range(runner.groups.grown)]
    draws = action_draws(rng_seed, "training", positions, runner.fleet.task.steps, len(runner.table))
    runner.begin(seeds)
    hidden_state = policy.initial_state([seed for seed in seeds for _ in range(runner.groups.members)])
    views, actions, results = [], [], []
    for step in range(runner.fleet.task.steps):
        views.append(runner.view())
        chosen, hidden_state = policy.act(views[-1], hidden_state, draws[step])
        actions.append(chosen)
        results.append(runner.step(chosen))
    return views, actions, results


def varies(columns: Tensor) -> Tensor:
    """(steps × envs, columns) → which columns are not constant."""
    return (columns.amax(0) - columns.amin(0)) > torch.finfo(torch.float32).eps


QUICK = "digits_quick"


def quick_config(rounds: int = 12, **changes: object) -> TrainConfig:
    """A run of rounds that take a moment and raise no alarm: two hosts and their controls, a small policy that commits
    what it germinates."""
    if QUICK not in TaskRegistry.names():
        TaskRegistry.register(
            replace(
                get_task("digits_blind"),
                name=QUICK,
                slot_ids=("r1c0",),
                steps=10,
                batches_per_step=1,
                batch=8,
                calibration_size=16,
                validation_size=200,
            )
        )
    bias = {LifecycleOp.GERMINATE: 1.0, LifecycleOp.ADVANCE: 3.0, LifecycleOp.FOSSILIZE: 4.0, LifecycleOp.PRUNE: -3.0}
    network = NetworkConfig(encoder=16, hidden=16, head=16, first_bias=tuple(bias.get(op, 0.0) for op in LifecycleOp))
    steps = {"epochs": 2, "minibatches": 2, "rate": 1e-3, "rate_end": 1.0, "target_kl": 0.03}
    ppo = replace(growth_ppo(), network=network, **steps)  # type: ignore[arg-type]  # by name
    config = TrainConfig(task=QUICK, rounds=rounds, hosts=4, members=1, preset="core", sensing=False, ppo=ppo)
    return replace(config, **changes)  # type: ignore[arg-type]  # by name


def quick_trainer(folder: Path, rounds: int = 12, **changes: object) -> Trainer:
    """A new quick run. Hosts that hardly learn differ by less than the error of a gain: its floor is lowered."""
    trainer = Trainer(quick_config(rounds, **changes), folder)
    trainer.agent.config = replace(trainer.agent.config, advantage_floor=1e-3)
    return trainer


def purpose_of(seed: int) -> Purpose:
    """The purpose whose range, of 2**60 seeds each, contains a host seed."""
    return PURPOSES[seed // 2**60]
