"""One host at a time: train a step, validate, tick. The reference loop that the fleet is compared with."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from esper.kasmina import Comparison, GrowingOptimizer, Host, LifecycleConfig
from esper.kasmina.slot import Isolation
from esper.leyline import SeedStage, StageChange, derive_seed
from esper.tolaria.batches import Batches
from esper.tolaria.tasks import OptimiserConfig, Task

DECAY_SHARE = 1 / 3
FINAL_RATE = 0.1


def rate_factor(progress: float) -> float:
    """Constant, then linear to 10 % over the last third; `progress` in [0, 1] is the share of the episode."""
    late = max(0.0, (progress - (1 - DECAY_SHARE)) / DECAY_SHARE)
    return 1.0 - (1.0 - FINAL_RATE) * min(1.0, late)


def make_optimizer(config: OptimiserConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The torch optimiser of a task."""
    if config.kind == "sgd":
        return partial(torch.optim.SGD, lr=config.rate, momentum=config.momentum, weight_decay=config.weight_decay)
    return partial(torch.optim.AdamW, lr=config.rate, weight_decay=config.weight_decay)


class HostTrainer:
    """One host with its episode. Weights, data order and augmentation are a pure function of `rng_seed`."""

    def __init__(
        self,
        task: Task,
        batches: Batches,
        rng_seed: int,
        *,
        host: Host | None = None,
        isolation: Isolation = "shadow",
        config: LifecycleConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.task, self.batches, self.rng_seed = task, batches, rng_seed
        host = (task.make_host(rng_seed) if host is None else host).to(device)
        self.model = task.make_model(host, rng_seed, isolation, config or LifecycleConfig())
        build = make_optimizer(task.optimiser)
        self.optimizer = GrowingOptimizer(self.model, build, clip_norm=task.optimiser.clip_norm)
        self.step_index = 0
        self.train_loss = float("nan")
        self._order_seed = derive_seed(rng_seed, "data")
        self._validation = batches.validation()
        self._calibration = batches.calibration(task.calibration_size)

    def train_step(self) -> float:
        """`batches_per_step` minibatches at constant alpha; returns the mean loss of the main row."""
        self.model.train()
        total = torch.zeros((), device=self._calibration.device, dtype=torch.float64)
        per_step = self.task.batches_per_step
        for index in range(per_step):
            self._set_rates(index)
            inputs, targets = self.batches.minibatch(self._order_seed, self.step_index * per_step + index)
            self.optimizer.zero_grad()
            losses = self.model.losses(inputs, targets)
            torch.stack(list(losses.values())).sum().backward()
            self.optimizer.step()
            total += losses["main"].detach()
        self.train_loss = float(total) / per_step
        return self.train_loss

    def validate(self) -> Comparison:
        """Score main row, auditions and contributions on the validation set, and record them in the seeds' states."""
        return self.model.measure(*self._validation, self._calibration, by_loss=self.task.by_loss)

    def tick(self) -> tuple[StageChange, ...]:
        """End the step."""
        self.step_index += 1
        return self.model.tick()

    def run_step(self) -> Comparison:
        """Train, validate, tick."""
        self.train_step()
        comparison = self.validate()
        self.tick()
        return comparison

    def _set_rates(self, index: int) -> None:
        """Host and seeds follow one schedule; a seed's first step of training is a linear warm-up."""
        progress = (self.step_index + index / self.task.batches_per_step) / self.task.steps
        rate = self.task.optimiser.rate * rate_factor(progress)
        reports = {report.slot_id: report for report in self.model.reports()}
        for group in self.optimizer.wrapped.param_groups:
            seed = reports.get(group["name"])
            newborn = seed is not None and seed.stage is SeedStage.TRAINING and seed.steps_in_stage == 0
            group["lr"] = rate * ((index + 1) / self.task.batches_per_step if newborn else 1.0)
