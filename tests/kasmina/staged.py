"""Models of three kinds whose seeds stand at any stage, and data to train them on."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import (
    CNNHost,
    GateThresholds,
    GPTHost,
    GrowingOptimizer,
    Host,
    LifecycleConfig,
    MorphogeneticModel,
    SeedState,
    Segment,
    lifecycle,
)
from esper.kasmina.layers import Linear, Statistics, reset_parameters
from esper.leyline import Measurement, SeedStage, SlotSpec

CONFIG = LifecycleConfig(cooldown=4, thresholds=GateThresholds(min_training_steps=1))
CLASSES = 3


class DenseSegment(Segment):
    """Linear, then a tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return torch.tanh(self.linear(h)), {}


class MLPHost(Host):
    """A host that no checkpoint can rebuild by itself: three vector slots."""

    def __init__(self) -> None:
        widths = (5, 8, 8, 8, CLASSES)
        segments = [DenseSegment(i, o) for i, o in pairwise(widths)]
        super().__init__(segments, [SlotSpec(f"r0c{i}", 8, "vector", (i + 1) / 4) for i in range(3)])


HOSTS: dict[str, Callable[[], Host]] = {
    "cnn": lambda: CNNHost((4, 4), pools=1, classes=CLASSES, resolution=6),
    "gpt": lambda: GPTHost(layers=4, width=8, heads=2, block=5, vocab=CLASSES),
    "mlp": MLPHost,
}
SLOTS = {"cnn": ("r0c0", "r1c0", "r0c1"), "gpt": ("r0c0", "r0c1", "r0c2"), "mlp": ("r0c0", "r0c1", "r0c2")}
BLUEPRINTS = {
    "cnn": ("depthwise", "norm", "attention"),
    "gpt": ("attention", "mlp", "lora"),
    "mlp": ("norm", "mlp", "lora"),
}


def inputs(kind: str) -> Tensor:
    """A small batch for a host."""
    generator = torch.Generator().manual_seed(7)
    if kind == "gpt":
        return torch.randint(0, CLASSES, (4, 5), generator=generator)
    return torch.randn((4, 3, 6, 6) if kind == "cnn" else (4, 5), generator=generator)


def targets(kind: str) -> Tensor:
    """Classes for that batch."""
    return torch.arange(20).reshape(4, 5) % CLASSES if kind == "gpt" else torch.arange(4) % CLASSES


def bring(model: MorphogeneticModel, slot_id: str, stage: SeedStage, blueprint: str, style: str) -> None:
    """Grow a seed with weights that act, up to a stage, by the lifecycle's own verbs."""
    if stage is SeedStage.DORMANT:
        return
    model.germinate_seed(slot_id, blueprint, style=style, tempo=3, alpha_target=0.7)
    slot = model.seed_slots[slot_id]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in slot.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))

    def tick(times: int) -> None:
        for _ in range(times):
            slot.settle(lifecycle.tick(slot.state, model.config)[0])

    if stage is SeedStage.GERMINATED:
        return
    tick(2)
    slot.settle(lifecycle.record_gradient(slot.state, math.inf))
    slot.settle(lifecycle.record_audition(slot.state, Measurement(1.5, 0.1)))
    if stage is SeedStage.TRAINING:
        return
    slot.settle(lifecycle.record_gradient(slot.state, 0.1 + 0.2))
    model.advance(slot_id)
    if stage is SeedStage.BLENDING:
        return
    tick(4)
    slot.settle(lifecycle.record_contribution(slot.state, Measurement(1 / 3, math.inf)))
    if stage is SeedStage.FOSSILIZED:
        model.fossilize(slot_id)
    elif stage is not SeedStage.HOLDING:
        model.prune_seed(slot_id)
        # cooldown 4: PRUNED at 4, EMBARGOED at 3 and 2, RESETTING at 1
        tick({SeedStage.PRUNED: 0, SeedStage.EMBARGOED: 1, SeedStage.RESETTING: 3}[stage])
    assert slot.state.stage is stage


def build(kind: str, stages: dict[str, SeedStage], style: str = "add", isolation: str = "shadow") -> MorphogeneticModel:
    """A model whose seeds stand at these stages."""
    host = HOSTS[kind]()
    reset_parameters(host, 11)
    wanted: Any = isolation  # Any: tests name it as a plain string
    model = MorphogeneticModel(host, list(stages), config=CONFIG, isolation=wanted, budget=10_000, rng_seed=5)
    for slot_id, blueprint in zip(SLOTS[kind], BLUEPRINTS[kind], strict=True):
        if slot_id in stages:
            bring(model, slot_id, stages[slot_id], blueprint, style)
    return model.eval()


def rest_of_training(model: MorphogeneticModel, kind: str) -> list[float]:
    """All losses of two more steps of training."""
    optimiser = GrowingOptimizer(model.train(), lambda p: torch.optim.Adam(p, lr=0.01), clip_norm=1.0)
    result: list[float] = []
    for _ in range(2):
        losses = model.losses(inputs(kind), targets(kind))
        result += [float(loss.detach()) for loss in losses.values()]
        optimiser.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimiser.step()
        model.tick()
    model.eval()
    return result


def states(model: MorphogeneticModel) -> dict[str, SeedState]:
    """The state of every slot."""
    return {slot_id: slot.state for slot_id, slot in model.seed_slots.items()}
