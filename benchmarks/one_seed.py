"""One seed grown in mid-training by a fixed plan, beside the host that never grows: the run behind two benchmarks."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from esper.kasmina import Comparison
from esper.leyline import SeedStage
from esper.tolaria import HostTrainer, Task
from esper.tolaria.batches import Batches


class Plan(NamedTuple):
    """Germinate once, train in the shadow, blend, hold, fossilise."""

    slot_id: str
    blueprint: str
    germinate_at: int
    shadow_steps: int = 6


def unlimited(task: Task) -> Task:
    """The task without a budget: here every cell is measured, also those that no controller could pay for."""
    return replace(task, budget=sys.maxsize)


OnStep = Callable[[HostTrainer, Comparison], None]


def grow(task: Task, batches: Batches, rng_seed: int, plan: Plan | None, on_step: OnStep | None = None) -> HostTrainer:
    """Run a whole episode; with no plan the host never grows.

    `on_step` sees every step before its tick. Without it only the steps are validated where the lifecycle asks for it.
    """
    trainer = HostTrainer(task, batches, rng_seed, device=batches.calibration(1).device)
    for step in range(task.steps):
        if plan is not None:
            _decide(trainer, plan, step)
        trainer.train_step()
        if on_step is not None:
            on_step(trainer, trainer.validate())
        elif plan is not None and trainer.model.seed_slots[plan.slot_id].state.stage is SeedStage.HOLDING:
            trainer.validate()
        trainer.tick()
    return trainer


def _decide(trainer: HostTrainer, plan: Plan, step: int) -> None:
    state = trainer.model.seed_slots[plan.slot_id].state
    if step == plan.germinate_at:
        trainer.model.germinate_seed(plan.slot_id, plan.blueprint)
    elif state.stage is SeedStage.TRAINING and state.steps_in_stage >= plan.shadow_steps:
        trainer.model.advance(plan.slot_id)
    elif state.stage is SeedStage.HOLDING and state.steps_in_stage >= 1:
        trainer.model.fossilize(plan.slot_id)
