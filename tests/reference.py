"""Hosts trained one after the other by a plain loop: what a fleet is measured against.

Nothing here is stacked, padded or shared. Each host is a `MorphogeneticModel`; the host and every seed have a torch
optimiser of their own; gradients come from autograd and are clipped by torch. The verbs take (env, slot) as a fleet's
do, so one script can be played to both.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina import Comparison, LifecycleConfig, MorphogeneticModel, SeedState
from esper.leyline import SeedStage, derive_seed
from esper.tolaria import OptimiserConfig, Task
from esper.tolaria.batches import Batches

HOST = "host"


def torch_optimiser(config: OptimiserConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What a task asks for, as torch has it."""
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, config.rate, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, config.rate, weight_decay=config.weight_decay)


def scheduled_rate(task: Task, minibatch: int) -> float:
    """Constant for two thirds of the episode, then on a straight line to a tenth."""
    progress = minibatch / (task.steps * task.batches_per_step)
    return task.optimiser.rate * (1.0 if progress <= 2 / 3 else 1.0 - 0.9 * (progress - 2 / 3) * 3)


class LoneHost:
    """One host with its seeds, its optimisers and its data."""

    def __init__(
        self, task: Task, batches: Batches, rng_seed: int, dtype: torch.dtype, config: LifecycleConfig | None
    ) -> None:
        self.task, self.batches, self.dtype = task, batches, dtype
        self.order_seed = derive_seed(rng_seed, "data")
        self.model = MorphogeneticModel(
            task.make_host(rng_seed).to(dtype),
            task.slot_ids,
            config=config,
            budget=task.parameter_budget,
            rng_seed=derive_seed(rng_seed, "seeds"),
        )
        self.step_index = 0
        self.adopt(self.model)

    def adopt(self, model: MorphogeneticModel) -> None:
        """Go on with this model, and with optimisers that know nothing yet."""
        self.model = model
        self.optimisers = {HOST: torch_optimiser(self.task.optimiser, model.host_parameters())}
        self.follow_structure()

    def follow_structure(self) -> None:
        """An optimiser for each seed that lives, none for those that are gone."""
        alive = self.model.live_slots()
        for slot_id in self.task.slot_ids:
            if slot_id not in alive:
                self.optimisers.pop(slot_id, None)
            elif slot_id not in self.optimisers:
                self.optimisers[slot_id] = torch_optimiser(self.task.optimiser, self.model.seed_parameters(slot_id))

    def cast(self, x: Tensor) -> Tensor:
        """Images in the dtype of the network; ids of characters stay what they are."""
        return x.to(self.dtype) if x.is_floating_point() else x

    def train_step(self) -> float:
        """The minibatches of a step; returns their mean loss."""
        self.follow_structure()
        self.model.train()
        losses = []
        for place in range(self.task.batches_per_step):
            minibatch = self.step_index * self.task.batches_per_step + place
            inputs, targets = self.batches.minibatch(self.order_seed, minibatch)
            warm = (place + 1) / self.task.batches_per_step
            losses.append(self.train_minibatch(self.cast(inputs), targets, scheduled_rate(self.task, minibatch), warm))
        return math.fsum(losses) / len(losses)

    def train_minibatch(self, inputs: Tensor, targets: Tensor, rate: float, warm: float) -> float:
        """Forward, backward, clip and step; `warm` is the share of the rate that newborn seeds get."""
        for optimiser in self.optimisers.values():
            optimiser.zero_grad()
        losses = self.model.losses(inputs, targets)
        torch.stack(list(losses.values())).sum().backward()
        norms: dict[str, float] = {}
        for name, optimiser in self.optimisers.items():
            group = optimiser.param_groups[0]
            if all(parameter.grad is None for parameter in group["params"]):
                continue  # a seed that only waits for its training
            norms[name] = float(nn.utils.clip_grad_norm_(group["params"], self.task.optimiser.clip_norm))
            group["lr"] = rate * (warm if self.is_newborn(name) else 1.0)
            optimiser.step()
        self.model.observe_gradients(norms)
        return float(losses["main"].detach())

    def is_newborn(self, name: str) -> bool:
        """A seed in its first step of training."""
        if name == HOST:
            return False
        state = self.model.seed_slots[name].state
        return state.stage is SeedStage.TRAINING and state.steps_in_stage == 0

    def validate(self) -> Comparison:
        """Main row, auditions, contributions."""
        inputs, targets = self.batches.validation()
        calibration = self.batches.calibration(self.task.calibration_size)
        by_loss = self.task.by_loss
        return self.model.measure(self.cast(inputs), targets, self.cast(calibration), by_loss=by_loss)

    def tick(self) -> None:
        """End the step."""
        self.step_index += 1
        self.model.tick()
        self.follow_structure()


class OneByOne:
    """Lone hosts behind the verbs of a fleet."""

    def __init__(
        self,
        task: Task,
        seeds: Sequence[int],
        batches: Batches,
        *,
        dtype: torch.dtype = torch.float32,
        config: LifecycleConfig | None = None,
    ) -> None:
        self.hosts = [LoneHost(task, batches, seed, dtype, config) for seed in seeds]
        self._snapshots: dict[int, MorphogeneticModel] = {}

    @property
    def models(self) -> list[MorphogeneticModel]:
        """The networks themselves."""
        return [host.model for host in self.hosts]

    def states(self, env: int) -> Mapping[str, SeedState]:
        """What is in the slots of one host."""
        return {slot_id: slot.state for slot_id, slot in self.models[env].seed_slots.items()}

    def train_step(self) -> list[float]:
        """Mean losses, by env."""
        return [host.train_step() for host in self.hosts]

    def validate(self) -> list[Comparison]:
        """What was found, by env."""
        return [host.validate() for host in self.hosts]

    def tick(self) -> None:
        """End the step of every host."""
        for host in self.hosts:
            host.tick()

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> None:
        """Plant a seed."""
        self.models[env].germinate_seed(slot_id, blueprint, style=style, tempo=tempo, alpha_target=alpha_target)

    def advance(self, env: int, slot_id: str) -> None:
        """One transition forward."""
        self.models[env].advance(slot_id)

    def fossilize(self, env: int, slot_id: str) -> None:
        """Commit a seed."""
        self.models[env].fossilize(slot_id)

    def set_alpha_target(self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear") -> None:
        """Send a seed to another alpha."""
        self.models[env].set_alpha_target(slot_id, target, steps=steps, curve=curve)

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> None:
        """Cut a seed."""
        self.models[env].prune_seed(slot_id, steps=steps, curve=curve)
        self.hosts[env].follow_structure()

    def note(self, env: int, slot_id: str, record: Callable[[SeedState], SeedState]) -> None:
        """Write a measurement into a seed's state."""
        slot = self.models[env].seed_slots[slot_id]
        slot.settle(record(slot.state))

    def snapshot(self) -> None:
        """Remember all hosts as they are."""
        self._snapshots = {env: copy.deepcopy(model) for env, model in enumerate(self.models)}

    def restore(self, env: int) -> None:
        """Put one host back; its optimisers start anew."""
        self.hosts[env].adopt(copy.deepcopy(self._snapshots[env]))
