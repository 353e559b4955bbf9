"""Small tasks, fleets with seeds in every stage, and ways to compare fleets: with lone hosts, and with each other."""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from reference import OneByOne
from torch import Tensor

from esper.kasmina import CNNHost, Comparison, GateThresholds, GPTHost, LifecycleConfig, SeedState, lifecycle
from esper.kasmina.compare import RowScore
from esper.kasmina.slot import Isolation
from esper.leyline import Measurement, SeedStage
from esper.tolaria import HostFleet, OptimiserConfig, Task, get_task
from esper.tolaria.batches import Batches, ImageBatches, TextBatches
from esper.tolaria.data import ImageData, ImagePart, TextData
from esper.tolaria.rows import Rows, eval_rows

Kind = Literal["cnn", "gpt"]

AT_ONCE = LifecycleConfig(min_prune_age=0, thresholds=GateThresholds(min_training_steps=0, min_holding_steps=0))
"""No waiting: gates ask only for what was measured."""

SGD = OptimiserConfig(kind="sgd", rate=0.1)
ADAMW = OptimiserConfig(kind="adamw", rate=3e-3, weight_decay=0.01)

CPU = torch.device("cpu")
SIDE, VOCABULARY, BLOCK = 8, 11, 6

CNN_TASK = replace(
    get_task("digits_varied"),
    name="noise",
    build_host=lambda: CNNHost((4, 8, 16), 3, 3, 10, in_channels=1, resolution=SIDE, masked=True),
    steps=5,
    batches_per_step=4,
    batch=16,
    calibration_size=64,
    defects=(*get_task("digits_varied").defects, "3n-1w-3n"),
    budget=5_000,
)
"""Images of noise for hosts that see shapes, that do not, whose first slot is cut, and that are badly sized."""

GPT_TASK = replace(
    get_task("shakespeare_char"),
    name="babble",
    build_host=lambda: GPTHost(4, 8, 2, BLOCK, VOCABULARY),
    classes=VOCABULARY,
    steps=5,
    batches_per_step=4,
    batch=8,
    calibration_size=16,
    budget=5_000,
    score="accuracy",
)


def image_batches(task: Task, device: torch.device = CPU, count: int = 200) -> ImageBatches:
    """Images in which no two pixels are equal: where max pooling finds ties, rounding would decide."""
    generator = torch.Generator().manual_seed(7)

    def part(size: int) -> ImagePart:
        images = torch.rand(size, 256, generator=generator).argsort(1)[:, : SIDE * SIDE].view(size, 1, SIDE, SIDE)
        return ImagePart(images.to(torch.uint8), images.flatten(1)[:, :10].argmax(1))

    data = ImageData("noise", part(count), part(60), part(60), tuple("0123456789"), (0.5,), (0.29,))
    return ImageBatches(data, task.batch, shift=task.shift, flip=task.flip, device=device)


def text_batches(task: Task, device: torch.device = CPU, count: int = 300) -> TextBatches:
    """Characters at random."""
    text = torch.randint(VOCABULARY, (count + 200,), generator=torch.Generator().manual_seed(7))
    data = TextData("babble", text[:count], text[count : count + 100], text[count + 100 :], tuple("abcdefghijk"))
    return TextBatches(data, task.batch, BLOCK, device=device)


def task_of(kind: Kind, optimiser: OptimiserConfig = SGD) -> Task:
    """The small task of that kind."""
    return replace(CNN_TASK if kind == "cnn" else GPT_TASK, optimiser=optimiser)


def rounding_task(kind: Kind, optimiser: OptimiserConfig) -> Task:
    """One for comparisons in fp32: short sums, no clipping, and no kernel of one tap, whose gradient a norm cancels."""
    return replace(task_of(kind), batch=4, defects=("none",), optimiser=replace(optimiser, clip_norm=1e6))


def kind_of(task: Task) -> Kind:
    """Which of the two it is."""
    return "cnn" if task.name == CNN_TASK.name else "gpt"


def batches_of(task: Task, device: torch.device = CPU) -> Batches:
    """Its data."""
    return image_batches(task, device) if kind_of(task) == "cnn" else text_batches(task, device)


@dataclass(frozen=True)
class Seedling:
    """A seed that a fleet is to have."""

    env: int
    slot: int
    """Which of the task's slots."""
    blueprint: str
    style: str
    stage: SeedStage
    target: float = 1.0
    tempo: int = 3


_S = SeedStage
SEEDLINGS: dict[Kind, tuple[Seedling, ...]] = {
    "cnn": (
        # Env 0 has none.
        Seedling(1, 0, "norm", "add", _S.GERMINATED),
        Seedling(1, 1, "conv_light", "gate", _S.GERMINATED),
        Seedling(2, 0, "conv_light", "add", _S.TRAINING),
        Seedling(2, 1, "attention", "multiply", _S.TRAINING),
        Seedling(2, 2, "bottleneck", "gate", _S.TRAINING),
        Seedling(3, 0, "conv_light", "gate", _S.BLENDING),
        Seedling(3, 1, "depthwise", "add", _S.TRAINING),
        Seedling(4, 0, "conv_light", "multiply", _S.HOLDING, 0.7, 0),
        Seedling(4, 1, "attention", "gate", _S.BLENDING, 0.5),
        Seedling(4, 2, "norm", "add", _S.TRAINING),
        Seedling(5, 0, "depthwise", "add", _S.FOSSILIZED, 1.0, 0),
        Seedling(5, 1, "attention", "add", _S.FOSSILIZED, 0.5, 0),
        Seedling(5, 2, "conv_small", "gate", _S.HOLDING, 1.0, 0),
        Seedling(6, 0, "norm", "gate", _S.PRUNED),
        Seedling(6, 1, "depthwise", "multiply", _S.BLENDING, 1.0, 5),
        Seedling(7, 0, "conv_light", "add", _S.FOSSILIZED, 1.0, 0),
        Seedling(7, 1, "conv_light", "add", _S.TRAINING),
        Seedling(7, 2, "bottleneck", "add", _S.TRAINING),
    ),
    "gpt": (
        Seedling(1, 0, "norm", "add", _S.GERMINATED),
        Seedling(1, 1, "mlp_small", "gate", _S.GERMINATED),
        Seedling(2, 0, "mlp", "add", _S.TRAINING),
        Seedling(2, 1, "attention", "multiply", _S.TRAINING),
        Seedling(2, 2, "lora", "gate", _S.TRAINING),
        Seedling(3, 0, "mlp", "gate", _S.BLENDING),
        Seedling(3, 1, "lora", "add", _S.TRAINING),
        Seedling(4, 0, "mlp", "multiply", _S.HOLDING, 0.7, 0),
        Seedling(4, 1, "attention", "gate", _S.BLENDING, 0.5),
        Seedling(4, 2, "norm", "add", _S.TRAINING),
        Seedling(5, 0, "attention", "add", _S.FOSSILIZED, 1.0, 0),
        Seedling(5, 1, "attention", "add", _S.FOSSILIZED, 0.5, 0),
        Seedling(5, 2, "lora_large", "gate", _S.HOLDING, 1.0, 0),
        Seedling(6, 0, "norm", "gate", _S.PRUNED),
        Seedling(6, 1, "lora", "multiply", _S.BLENDING, 1.0, 5),
        Seedling(7, 0, "mlp", "add", _S.FOSSILIZED, 1.0, 0),
        Seedling(7, 1, "mlp", "add", _S.TRAINING),
        Seedling(7, 2, "lora", "add", _S.TRAINING),
    ),
}
"""Every stage that can be brought about at once (the rest of a pruned slot follows by ticks), in three slots."""


Growable = HostFleet | OneByOne
"""They have their verbs in common."""

MEASURED = Measurement(1.0, 0.1)
"""Stands in for a measurement where a test wants to be past the gates at once."""


def note(grower: Growable, env: int, slot_id: str, record: Callable[[SeedState], SeedState]) -> None:
    """Write a measurement into a seed's state."""
    if isinstance(grower, HostFleet):
        grower.states[env][slot_id] = record(grower.states[env][slot_id])
    else:
        grower.note(env, slot_id, record)


def grow(grower: Growable, seedlings: Sequence[Seedling], slots: Sequence[str]) -> None:
    """Plant seeds and walk each to its stage. Needs a lifecycle without waiting times (`AT_ONCE`)."""
    path = [_S.GERMINATED, _S.TRAINING, _S.BLENDING, _S.HOLDING, _S.FOSSILIZED]
    for seedling in seedlings:
        env, slot_id = seedling.env, slots[seedling.slot]
        grower.germinate(
            env,
            slot_id,
            seedling.blueprint,
            style=seedling.style,
            tempo=seedling.tempo,
            alpha_target=seedling.target,
        )
        if seedling.stage is _S.PRUNED:
            grower.prune(env, slot_id)
            continue
        for _ in range(path.index(seedling.stage)):
            note(grower, env, slot_id, lambda state: lifecycle.record_gradient(state, 1.0))
            note(grower, env, slot_id, lambda state: lifecycle.record_contribution(state, MEASURED))
            grower.advance(env, slot_id)


def make_fleet(
    task: Task,
    n: int = 8,
    *,
    seeds: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    grown: bool = True,
    isolation: Isolation = "shadow",
    compute: torch.dtype | None = None,
) -> HostFleet:
    """Eight hosts with seeds in every stage, or bare ones."""
    batches = batches_of(task, device)
    fleet = HostFleet(
        task, n, device, seeds, batches=batches, dtype=dtype, compute=compute, config=AT_ONCE, isolation=isolation
    )
    if grown:
        grow(fleet, SEEDLINGS[kind_of(task)], task.slot_ids)
    return fleet


def make_lone(
    task: Task, seeds: Sequence[int] = tuple(range(8)), *, dtype: torch.dtype = torch.float32, grown: bool = True
) -> OneByOne:
    """The same hosts, one by one."""
    lone = OneByOne(task, seeds, batches_of(task), dtype=dtype, config=AT_ONCE)
    if grown:
        grow(lone, SEEDLINGS[kind_of(task)], task.slot_ids)
    return lone


@torch.no_grad()
def evaluation_rows(fleet: HostFleet) -> tuple[Rows, dict[int, tuple[int, str]]]:
    """The rows of a validation of all envs, and (env, slot) of the extra ones by their number."""
    fleet.update_plan()
    return eval_rows(fleet, range(len(fleet.host.weights)))


def shake(fleet: HostFleet, size: float = 0.3) -> None:
    """Move all weights by noise, so that none is at the special value of its birth."""
    generator = torch.Generator().manual_seed(1)
    for env, states in enumerate(fleet.states):
        banks = [fleet.banks[slot_id, s.blueprint] for slot_id, s in states.items() if s.blueprint is not None]
        for weights in (fleet.host.weights, *(bank.weights for bank in banks)):
            noise = torch.randn(weights.matrix.shape[1], generator=generator)
            weights.matrix[env] += size * noise.to(weights.matrix)


# -- comparing --------------------------------------------------------------------------------------------------------


NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Tensors that are nowhere larger are rounding: a norm's bias that the next norm takes away again."""


def difference(mine: Tensor, reference: Tensor) -> float:
    """max |difference| / max |reference|; not divided where the reference is rounding."""
    assert mine.shape == reference.shape
    scale = float(reference.detach().abs().max())
    gap = float((mine.detach().cpu().double() - reference.detach().cpu().double()).abs().max())
    return gap / scale if scale > NOISE[reference.dtype] else gap


def everything_of(fleet: HostFleet, env: int) -> dict[str, Tensor]:
    """Copies of all that one env is made of: weights, statistics, seeds with their gates, and what optimisers keep."""
    found = {"host": fleet.host.weights.matrix[env], "steps": fleet.optimizer.steps[env]}
    found |= {name: tensor[env] for name, tensor in fleet.host.buffers.items()}
    found |= {f"host, {kind}": tensor[env] for kind, tensor in fleet.optimizer.state.items()}
    for slot_id, state in fleet.states[env].items():
        if state.blueprint is not None:
            bank = fleet.banks[slot_id, state.blueprint]
            found |= {slot_id: bank.weights.matrix[env], f"{slot_id}, steps": bank.optimizer.steps[env]}
            found |= {f"{slot_id}, {kind}": tensor[env] for kind, tensor in bank.optimizer.state.items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    return left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert same_bits(value, right[name]), name


def assert_same_env(fleet: HostFleet, twin: HostFleet, env: int) -> None:
    """An env is bit for bit and state for state what it is in another fleet."""
    assert fleet.states[env] == twin.states[env], env
    assert_same(everything_of(fleet, env), everything_of(twin, env))


def assert_same_score(left: RowScore, right: RowScore) -> None:
    """Bit for bit."""
    assert torch.equal(left.hits, right.hits)
    assert same_bits(left.losses, right.losses)


def assert_same_scores(left: Comparison, right: Comparison) -> None:
    """Main rows and deployed ones, bit for bit."""
    assert left.deployed is not None and right.deployed is not None
    assert_same_score(left.main, right.main)
    assert_same_score(left.deployed, right.deployed)


# Any: whatever an object graph holds.
def tensors_of(root: Any, *, without: Sequence[object] = ()) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object through its attributes and containers, with its gradient."""
    skipped = (types.ModuleType, types.FunctionType, types.MethodType, type, str, bytes, int, float)
    seen = {id(thing) for thing in without}
    waiting: list[Any] = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, skipped):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
            waiting.append(thing.grad if thing.is_leaf else None)
        elif isinstance(thing, Mapping):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        else:
            waiting += getattr(thing, "__dict__", {}).values()


def held_bytes(root: object, device: torch.device | None = None, *, without: Sequence[object] = ()) -> int:
    """Bytes of all storages that an object holds, each counted once; on one kind of device, or on all."""
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for tensor in tensors_of(root, without=without)
        if device is None or tensor.device.type == device.type
    }
    return sum(storages.values())
