"""One host at a time: train a step, validate, tick. The plain loop that everything batched is measured against."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from esper.kasmina import Comparison, GrowingOptimizer, Host, LifecycleConfig, MorphogeneticModel
from esper.kasmina.slot import Isolation
from esper.leyline import HostSignals, SeedStage, StageChange, derive_seed
from esper.tolaria.batches import Batches
from esper.tolaria.tasks import OptimiserConfig, Task

DECAY_SHARE = 1 / 3
FINAL_RATE = 0.1


def rate_factor(progress: float) -> float:
    """Constant, then linear to 10 % over the last third; `progress` in [0, 1] is the share of the episode done."""
    late = max(0.0, (progress - (1 - DECAY_SHARE)) / DECAY_SHARE)
    return 1.0 - (1.0 - FINAL_RATE) * min(1.0, late)


def make_optimizer(config: OptimiserConfig) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The torch optimiser that a task asks for."""
    if config.kind == "sgd":
        return lambda parameters: torch.optim.SGD(
            parameters, lr=config.rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return lambda parameters: torch.optim.AdamW(parameters, lr=config.rate, weight_decay=config.weight_decay)


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
        self.model = MorphogeneticModel(
            host,
            task.slot_ids,
            isolation=isolation,
            config=config,
            budget=task.parameter_budget,
            rng_seed=derive_seed(rng_seed, "seeds"),
        )
        self.optimizer = GrowingOptimizer(
            self.model, make_optimizer(task.optimiser), clip_norm=task.optimiser.clip_norm
        )
        self.step_index = 0
        self.train_loss = float("nan")
        self._order_seed = derive_seed(rng_seed, "data")
        self._validation = batches.validation()
        self._calibration = batches.calibration(task.calibration_size)

    def train_step(self) -> float:
        """`batches_per_step` minibatches at constant alpha; returns the mean loss of the main row."""
        self.model.train()
        total = torch.zeros((), device=self._calibration.device, dtype=torch.float64)
        for place in range(self.task.batches_per_step):
            self._set_rates(place)
            inputs, targets = self.batches.minibatch(
                self._order_seed, self.step_index * self.task.batches_per_step + place
            )
            self.optimizer.zero_grad()
            losses = self.model.losses(inputs, targets)
            torch.stack(list(losses.values())).sum().backward()
            self.optimizer.step()
            total += losses["main"].detach()
        self.train_loss = float(total) / self.task.batches_per_step
        return self.train_loss

    def validate(self) -> Comparison:
        """Main row, auditions and contributions on the validation set; noted in the seeds' states."""
        return self.model.measure(*self._validation, self._calibration)

    def tick(self) -> tuple[StageChange, ...]:
        """End the step."""
        self.step_index += 1
        return self.model.tick()

    def run_step(self) -> Comparison:
        """Train, validate, tick."""
        self.train_step()
        found = self.validate()
        self.tick()
        return found

    def signals(self, found: Comparison) -> HostSignals:
        """What a controller may look at after this step."""
        return HostSignals(
            step=self.step_index,
            total_steps=self.task.steps,
            train_loss=self.train_loss,
            validation_loss=found.main.loss,
            validation_accuracy=found.main.accuracy,
            deployed_accuracy=found.deployed.accuracy,
            host_parameters=self.model.host_parameter_count,
            grown_parameters=self.model.grown_parameter_count,
            seeds=self.model.reports(),
        )

    def _set_rates(self, place: int) -> None:
        """Host and seeds follow one schedule; a seed's first step of training is a linear warm-up."""
        done = self.step_index + place / self.task.batches_per_step
        rate = self.task.optimiser.rate * rate_factor(done / self.task.steps)
        newborn = {
            report.slot_id
            for report in self.model.reports()
            if report.stage is SeedStage.TRAINING and report.steps_in_stage == 0
        }
        for group in self.optimizer.wrapped.param_groups:
            warm = (place + 1) / self.task.batches_per_step if group["name"] in newborn else 1.0
            group["lr"] = rate * warm
