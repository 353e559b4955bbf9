"""Tasks: data set, host, slots, budget, optimiser and the length of an episode. Listed by `esper tasks`."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

from esper.kasmina import BlueprintRegistry, CNNHost, GPTHost, Host, LifecycleConfig, MorphogeneticModel
from esper.kasmina.layers import reset_parameters
from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, SlotConfig, derive_seed
from esper.leyline.numbers import require_known
from esper.tolaria.batches import Batches, ImageBatches, TextBatches
from esper.tolaria.data import ImageData, TextData, load
from esper.tolaria.host_kinds import INTACT, check_kind, make_kind, parse_design

OptimiserKind = Literal["sgd", "adamw"]
Score = Literal["accuracy", "loss"]


@dataclass(frozen=True)
class OptimiserConfig:
    """The optimiser of hosts and seeds."""

    kind: OptimiserKind = "sgd"
    rate: float = 0.05  # constant, then linear to 10 % over the last third of the episode
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip_norm: float = 1.0  # for the host and for each seed separately

    def __post_init__(self) -> None:
        require_known("optimiser", self.kind, get_args(OptimiserKind))
        finite = all(math.isfinite(value) for value in (self.rate, self.weight_decay, self.clip_norm))
        if not finite or min(self.rate, self.weight_decay) < 0 or self.clip_norm <= 0 or not 0 <= self.momentum < 1:
            raise BadValueError(f"{self}: rate and weight_decay must be ≥ 0, clip_norm > 0, momentum in [0, 1)")


@dataclass(frozen=True)
class Task:
    """Everything that defines an episode, except the controller."""

    name: str
    why: str
    dataset: str
    build_host: Callable[[], Host]
    classes: int
    slot_ids: tuple[str, ...]
    steps: int  # T: decisions in an episode
    batches_per_step: int
    batch: int
    validation_size: int
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    resolution: int | None = None  # side to which images are averaged down; None: original size
    train_size: int | None = None
    extra_size: int = 0  # validation images beside these, which score the end of an episode only
    shift: int = 0  # augmentation: pixels by which training images may move
    flip: bool = False
    calibration_size: int = 512
    defects: tuple[str, ...] = (INTACT,)  # possible kinds of hosts (`host_kinds`); each host draws its own
    budget: int | None = None  # parameters that may be grown; None: four times the host
    score: Score = "accuracy"  # what counts as a gain: points of accuracy, or percent of the control's loss

    def __post_init__(self) -> None:
        for name in ("classes", "steps", "batches_per_step", "batch", "validation_size", "calibration_size"):
            if getattr(self, name) < 1:
                raise BadValueError(f"task {self.name!r}: {name} {getattr(self, name)} must be at least 1")
        if not self.slot_ids or not self.defects:
            raise BadValueError(f"task {self.name!r} needs at least one slot and one kind of host ('none')")
        for defect in self.defects:
            check_kind(defect)
        require_known("score", self.score, get_args(Score))

    @property
    def random_guess_loss(self) -> float:
        """Cross-entropy of a uniform guess."""
        return math.log(self.classes)

    @property
    def by_loss(self) -> bool:
        """Whether hosts are scored by loss, as percent below the loss of guessing, instead of accuracy."""
        return self.score == "loss"

    @property
    def chance_accuracy(self) -> float:
        """The score of guessing, in percent."""
        return 0.0 if self.by_loss else 100.0 / self.classes

    @cached_property
    def host_parameters(self) -> int:
        """Parameters of the host alone."""
        return sum(parameter.numel() for parameter in self.build_host().parameters())

    @property
    def parameter_budget(self) -> int:
        """The number of parameters that a host may grow."""
        return 4 * self.host_parameters if self.budget is None else self.budget

    @cached_property
    def _sizes(self) -> dict[tuple[str, frozenset[str]], int]:
        return {}

    @cached_property
    def slot_config(self) -> SlotConfig:
        """The task's slots with the blueprints that fit each of them."""
        host = self.build_host()
        specs = [host.slots[host.slot_index(slot_id)] for slot_id in self.slot_ids]
        return SlotConfig(tuple(replace(spec, blueprints=BlueprintRegistry.offers(spec)) for spec in specs))

    def defect_of(self, seed: int) -> str:
        """The defect of a seed's host."""
        return self.defects[derive_seed(seed, "defect") % len(self.defects)]

    def make_host(self, seed: int) -> Host:
        """A fresh host: its weights, and its defect where the task has several, are a pure function of the seed."""
        # Layers of torch draw from the global stream as they are built: it is seeded for them, and restored.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "host"))
            host = self.build_host()
        reset_parameters(host, derive_seed(seed, "host"))
        make_kind(host, self.defect_of(seed), self.slot_ids[0])
        return host

    def size_of(self, seed: int, grown: Collection[str] = ()) -> int:
        """Parameters of a seed's host, with seeds in the slots of `grown`."""
        return self.size_of_kind(self.defect_of(seed), grown)

    def size_of_kind(self, kind: str, grown: Collection[str] = ()) -> int:
        """The same of a kind of host. Of a badly sized design only parameters that take part count."""
        if parse_design(kind) is None:
            return self.host_parameters
        if (key := (kind, frozenset(grown))) not in self._sizes:
            host = self.build_host()
            make_kind(host, kind, self.slot_ids[0])
            self._sizes[key] = host.live_parameters(grown)
        return self._sizes[key]

    def make_model(self, host: Host, seed: int, isolation: Isolation, config: LifecycleConfig) -> MorphogeneticModel:
        """A model that grows this host; its seeds are a pure function of `seed`."""
        rng_seed, budget = derive_seed(seed, "seeds"), self.parameter_budget
        return MorphogeneticModel(
            host, self.slot_ids, isolation=isolation, config=config, budget=budget, rng_seed=rng_seed
        )

    def load_data(self, data_dir: Path | str | None = None) -> ImageData | TextData:
        """The data set, loaded once and shared between callers."""
        return load(self.dataset, self.validation_size, self.train_size, self.resolution, data_dir, self.extra_size)

    def load_batches(self, data_dir: Path | str | None = None, device: torch.device | str = "cpu") -> Batches:
        """The data on a device, ready to draw minibatches from."""
        device, data = torch.device(device), self.load_data(data_dir)
        known = len(data.classes if isinstance(data, ImageData) else data.vocabulary)
        if known != self.classes:
            raise BadValueError(f"task {self.name!r} states {self.classes} classes, {self.dataset} has {known}")
        if isinstance(data, ImageData):
            return ImageBatches(data, self.batch, shift=self.shift, flip=self.flip, device=device)
        block = self.slot_config.slots[0].resolution
        assert block is not None, "hosts of text state their block as the resolution of their slots"
        return TextBatches(data, self.batch, block, device=device)


class TaskRegistry:
    """All tasks by name."""

    _tasks: ClassVar[dict[str, Task]] = {}

    @classmethod
    def register(cls, task: Task) -> Task:
        """Add a task. Raises BadValueError if its name is already registered."""
        if task.name in cls._tasks:
            raise BadValueError(f"task {task.name!r} is already registered; choose another name")
        cls._tasks[task.name] = task
        return task

    @classmethod
    def names(cls) -> list[str]:
        """Names in order of registration."""
        return list(cls._tasks)

    @classmethod
    def get(cls, name: str) -> Task:
        """The task of that name."""
        require_known("task", name, cls._tasks)
        return cls._tasks[name]


get_task = TaskRegistry.get

AFTER_POOLS = ("r1c0", "r1c1", "r1c2")
_DIGITS_BLIND = Task(
    name="digits_blind",
    why="1×1 kernels cannot see shapes: choices matter, and an episode takes seconds on a CPU",
    dataset="digits",
    build_host=lambda: CNNHost((4, 8, 16), 1, 3, 10, in_channels=1, resolution=8),
    classes=10,
    slot_ids=AFTER_POOLS,
    steps=20,
    batches_per_step=16,
    batch=64,
    validation_size=400,
)
_CIFAR_BASELINE = replace(
    _DIGITS_BLIND,
    name="cifar_baseline",
    why="CIFAR-10 on a host of three small blocks",
    dataset="cifar10",
    build_host=lambda: CNNHost((8, 16, 32), 3, 3, 10),
    batches_per_step=40,
    batch=256,
    validation_size=2_000,
    extra_size=8_000,
    shift=4,
    flip=True,
    optimiser=OptimiserConfig(rate=0.1),
)


def _cifar_batches(epochs: int) -> int:
    """Minibatches per step; 40,000 images are neither validation nor test."""
    return round(epochs * 40_000 / (_CIFAR_BASELINE.batch * _CIFAR_BASELINE.steps))


# Long episodes, in which a seed has time to pay its rent, and a budget for about two of the five places, so that a plan
# has to choose. benchmarks/plan_table.py measures what a choice of these is worth.
GROWTH_EPOCHS, VARIED_EPOCHS, GROWTH_BUDGET = 8, 12, 6_000
_CIFAR_GROWTH = replace(
    _CIFAR_BASELINE,
    name="cifar_growth",
    why="CIFAR-10 in long episodes: five places to grow, and parameters for about two",
    slot_ids=("r0c0", "r1c0", "r0c1", "r1c1", "r1c2"),
    batches_per_step=_cifar_batches(GROWTH_EPOCHS),
    budget=GROWTH_BUDGET,
)
# A block is sound, or has a 1×1 kernel and a quarter of its width. Hosts are intact, or at most one block is sound.
VARIED_DESIGNS = ("3w-3w-3w", "3w-1n-1n", "1n-3w-1n", "1n-1n-3w", "1n-1n-1n")
for _task in (
    _DIGITS_BLIND,
    replace(
        _DIGITS_BLIND,
        name="digits",
        why="a host that needs nothing: the right answer is to wait",
        build_host=lambda: CNNHost((4, 8, 16), 3, 3, 10, in_channels=1, resolution=8),
    ),
    replace(
        _DIGITS_BLIND,
        name="digits_varied",
        why="each host draws its defect: the right plan differs from host to host and can be sensed",
        build_host=lambda: CNNHost((4, 8, 16), 3, 3, 10, in_channels=1, resolution=8, masked=True),
        defects=("blind", "none", "blind_first_slot_cut"),
        budget=200,
    ),
    replace(
        _DIGITS_BLIND,
        name="fashion_small",
        why="Fashion-MNIST at 14×14: real images, and little to gain",
        dataset="fashion_mnist",
        build_host=lambda: CNNHost((4, 8, 16), 3, 3, 10, in_channels=1, resolution=14),
        batches_per_step=40,
        batch=128,
        validation_size=2_000,
        extra_size=8_000,
        resolution=14,
    ),
    _CIFAR_BASELINE,
    replace(
        _CIFAR_BASELINE,
        name="cifar_impaired",
        why="CIFAR-10 on a host of 77 parameters that cannot see shapes",
        build_host=lambda: CNNHost((1, 2, 4), 1, 3, 10),
    ),
    replace(
        _CIFAR_BASELINE,
        name="cifar_scale",
        why="CIFAR-10 on five blocks, 8 to 128 channels: more slots, wider ones",
        build_host=lambda: CNNHost((8, 16, 32, 64, 128), 3, 5, 10),
        slot_ids=(*AFTER_POOLS, "r1c3", "r1c4"),
    ),
    _CIFAR_GROWTH,
    replace(
        _CIFAR_GROWTH,
        name="cifar_varied",
        why="CIFAR-10 on badly sized designs: where to grow differs from host to host and can be sensed",
        build_host=lambda: CNNHost((8, 16, 32), 3, 3, 10, masked=True),
        defects=VARIED_DESIGNS,
        batches_per_step=_cifar_batches(VARIED_EPOCHS),
    ),
    Task(
        name="shakespeare_char",
        why="tiny Shakespeare by characters on a GPT of four layers: language",
        dataset="tinyshakespeare",
        build_host=lambda: GPTHost(4, 64, 4, 64, 65),
        classes=65,
        slot_ids=("r0c0", "r0c1", "r0c2"),
        steps=20,
        batches_per_step=40,
        batch=32,
        validation_size=100_000,
        optimiser=OptimiserConfig(kind="adamw", rate=2e-3, weight_decay=0.01),
        score="loss",
    ),
):
    TaskRegistry.register(_task)
