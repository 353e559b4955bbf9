"""A host of a built-in task, grown by a Grower in an ordinary loop; killed and resumed, it ends the same to the bit.

    FOLDER/config.json, events.jsonl, metrics.jsonl   the Grower's log
    FOLDER/host/         the host before growth, as plain PyTorch: `network.py` and its weights
    FOLDER/checkpoints/  the last complete steps
    FOLDER/finished/     the finished model: `grown_blocks.py` and all weights
    FOLDER/result.json   what was kept, and the scores on test data

Minibatches are a pure function of the seed and their number, so no random stream has to be stored. The last step has no
checkpoint: a run that was killed after it repeats it, because finishing needs its training inputs.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower.container import CHILD, ModelSlots
from esper.grower.grower import Grower
from esper.grower.policies import check_policy
from esper.grower.records import GrowthRecord
from esper.grower.scoring import eval_mode
from esper.kasmina import Host, MorphogeneticModel
from esper.kasmina.compare import CHUNK, cross_entropy
from esper.kasmina.layers import count_parameters
from esper.kasmina.training_checkpoints import join_state, split_state
from esper.leyline import BadValueError, CheckpointError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, decode, encode
from esper.simic.training.hosts import check_device
from esper.simic.training.run_folder import CONFIG
from esper.storage.files import replace_file
from esper.storage.interrupts import interrupts_held
from esper.storage.series import Series
from esper.storage.stored import Machine, StoredFormat, checkpoint_errors, read_stored, write_stored
from esper.tolaria import Task, get_task
from esper.tolaria.batches import Batches, Samples
from esper.tolaria.engine import make_optimizer, rate_factor

CHECKPOINTS, FINISHED, HOST, RESULT = "checkpoints", "finished", "host", "result.json"
GROWTH = StoredFormat("esper-task-growth", 1, "training.json", "training.safetensors")


@dataclass(frozen=True)
class GrowthSettings:
    """What a growth is determined by."""

    task: str
    budget: int
    """Parameters that may grow"""
    steps: int
    policy: str
    seed: int
    control: bool
    """Whether a twin that does not grow trains on the same minibatches"""
    device: str

    def check(self) -> None:
        """Raise for what cannot be."""
        require_whole("--budget", self.budget, 1, remark=": it is the number of parameters that may grow")
        require_whole("--steps", self.steps, 1)
        require_whole("--seed", self.seed, 0)
        check_policy(self.policy)
        check_device(self.device)


def plain(task: Task, host: Host, folder: Path | None = None) -> nn.Module:
    """A host as plain PyTorch, perhaps also written to a folder."""
    return MorphogeneticModel(host, task.slot_ids).harden(folder)


class Learner:
    """One network in training: the task's optimiser, its schedule, and its clipping."""

    def __init__(self, task: Task, batches: Batches, settings: GrowthSettings) -> None:
        self.task, self.batches, self.settings = task, batches, settings
        host = task.make_host(settings.seed).to(settings.device)
        self.slots = {
            f"segment{index}": task.slot_config[slot_id].width
            for slot_id in task.slot_ids
            if float(host.conductance[index := host.slot_index(slot_id)]) > 0  # elsewhere no seed reaches the output
        }
        self.model = plain(task, host).train()
        self.parameters = count_parameters(self.model)
        self.optimizer = make_optimizer(task.optimiser)(self.model.parameters())
        self._order = derive_seed(settings.seed, "data")

    def train_step(self, step: int, advance: Callable[[], None]) -> None:
        """The minibatches of a step, counted from 0."""
        self.model.train()
        per_step = self.task.batches_per_step
        for index in range(per_step):
            rate = self.task.optimiser.rate * rate_factor((step + index / per_step) / self.settings.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            inputs, targets = self.batches.minibatch(self._order, step * per_step + index)
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs), targets).backward()
            for own in self._apart():
                nn.utils.clip_grad_norm_(own, self.task.optimiser.clip_norm)
            self.optimizer.step()
            advance()

    def _apart(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of the host, and those of each seed: they are clipped separately."""
        yield [parameter for name, parameter in self.model.named_parameters() if not name.startswith(f"{CHILD}.")]
        slots = getattr(self.model, CHILD, None)
        if isinstance(slots, ModelSlots):
            yield from (list(slot.parameters()) for slot in slots.live().values())

    @torch.no_grad()
    def score(self, samples: Samples) -> dict[str, float]:
        """Accuracy in percent, and loss."""
        losses, correct = list[Tensor](), list[Tensor]()
        with eval_mode(self.model):
            for inputs, targets in chunks(samples):
                logits, classes = self.model(inputs).flatten(0, -2), targets.flatten()
                losses.append(F.cross_entropy(logits, classes, reduction="none"))
                correct.append(logits.argmax(-1) == classes)
        accuracy = 100 * float(torch.cat(correct).double().mean())
        return {"accuracy": accuracy, "loss": float(torch.cat(losses).double().mean())}

    def state(self) -> dict[str, Any]:  # Any: states of torch
        """Everything that training depends on."""
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state: the model first, so that its seeds are in the optimizer."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def chunks(samples: Samples) -> list[tuple[Tensor, Tensor]]:
    """Batches that fit into memory."""
    return list(zip(samples.inputs.split(CHUNK), samples.targets.split(CHUNK), strict=True))


def per_token(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy per prediction, for tasks that are scored by loss."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="none")


class TaskGrowth:
    """A growth in its folder, new or resumed."""

    def __init__(self, settings: GrowthSettings, folder: Path, *, data_dir: Path | None = None) -> None:
        """Start anew. The folder must not hold a run."""
        settings.check()
        if (folder / CONFIG).exists() or (folder / CHECKPOINTS).exists():
            raise BadValueError(f"{folder} already holds a run; name another with --out, or use --resume {folder}")
        self._build(settings, folder, data_dir)
        self.step = 0
        with eval_mode(self.grown.model), torch.no_grad():  # chooses the slots and begins the log
            self.grown.model(self.validation[0][0][:2])
        plain(self.task, self.task.make_host(settings.seed), folder / HOST)
        self.save()

    @classmethod
    def resume(cls, folder: Path, *, data_dir: Path | None = None) -> "TaskGrowth":
        """Continue after the last complete step, as the run was begun."""
        stored = Series(folder / CHECKPOINTS, "step").read_newest(_read)
        if stored is None:
            raise CheckpointError(f"{folder} holds no growth to resume: begin one with esper grow --out {folder}")
        step, settings, machine, states = stored
        settings.check()
        machine.warn_of_differences()
        growth = cls.__new__(cls)
        growth._build(settings, folder, data_dir)
        growth.step = step
        with checkpoint_errors(str(folder)):
            for name, learner in growth.learners.items():
                learner.restore(states[name])
        return growth

    def _build(self, settings: GrowthSettings, folder: Path, data_dir: Path | None) -> None:
        self.settings, self.folder, self.task = settings, folder, get_task(settings.task)
        batches = self.task.load_batches(data_dir, settings.device)
        self.grown = Learner(self.task, batches, settings)
        self.learners = {"grown": self.grown}
        if settings.control:
            self.learners["control"] = Learner(self.task, batches, settings)
        self.batches, self.validation = batches, chunks(batches.validation())
        self.series = Series(folder / CHECKPOINTS, "step")
        self.grower = Grower(
            self.grown.model,
            self.grown.optimizer,
            budget=settings.budget,
            steps=settings.steps,
            loss=per_token if self.task.by_loss else None,
            slots=self.grown.slots,
            policy=settings.policy,
            rng_seed=settings.seed,
            folder=folder,
        )

    @property
    def result(self) -> Json | None:
        """What `finish` wrote; None before."""
        path = self.folder / RESULT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def run_step(self, advance: Callable[[], None]) -> GrowthRecord:
        """Train, grow, and store the step, unless it is the last one."""
        for learner in self.learners.values():
            learner.train_step(self.step, advance)
        record = self.grower.step(self.validation)
        with interrupts_held():
            self.step += 1
            if self.step < self.settings.steps:
                self.save()
        return record

    def finish(self) -> Json:
        """End growth, score on test data, and write the finished model and the result."""
        seeds = {
            slot_id: {"slot": slot_id, "blueprint": seed.blueprint, "parameters": seed.parameters}
            for slot_id, seed in self.grower.report().slots.items()
            if seed.parameters
        }
        self.grower.finish(self.validation, folder=self.folder / FINISHED)
        kept = [slot_id for slot_id in seeds if hasattr(self.grown.model.get_submodule(slot_id), "grown")]
        test = self.batches.test()
        control = self.learners.get("control")
        result = {
            "settings": encode(self.settings),
            "defect": self.task.defect_of(self.settings.seed),
            "host_parameters": self.grown.parameters,
            "parameters": count_parameters(self.grown.model),
            "kept": [seeds[slot_id] for slot_id in kept],
            "dropped": [seed for slot_id, seed in seeds.items() if slot_id not in kept],
            "test": self.grown.score(test),
            "control": None if control is None else control.score(test),
        }
        replace_file(self.folder / RESULT, json.dumps(encode(result), indent=1, allow_nan=False) + "\n")
        return result

    def save(self) -> None:
        """Write a checkpoint, and remove all but the last few."""
        tensors: dict[str, Tensor] = {}
        content = {
            "step": self.step,
            "settings": asdict(self.settings),
            "machine": encode(Machine.here()),
            "states": {name: split_state(each.state(), name, tensors) for name, each in self.learners.items()},
        }
        write_stored(self.series.path_of(self.step), GROWTH, content, tensors)
        self.series.prune()


def _read(step: int, path: Path) -> tuple[int, GrowthSettings, Machine, dict[str, Any]]:
    content, tensors = read_stored(path, GROWTH)
    with checkpoint_errors(str(path)):
        if content["step"] != step:
            raise CheckpointError(f"{path} holds the checkpoint of step {content['step']}: it was copied or renamed")
        settings: GrowthSettings = decode(GrowthSettings, content["settings"], "settings")
        machine: Machine = decode(Machine, content["machine"], "machine")
        return step, settings, machine, {name: join_state(each, tensors) for name, each in content["states"].items()}
