"""Small hosts for tests, one per topology, with data for each and a quick way to a seed in any stage.

`MLPHost` also shows what it takes to write a host: segments, and a slot after each of them but the last.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import CNNHost, GateThresholds, GPTHost, Host, LifecycleConfig, MorphogeneticModel, Segment
from esper.kasmina.layers import Linear, Statistics, reset_parameters
from esper.leyline import SeedStage, SlotSpec, slot_id

HostKind = Literal["cnn", "gpt", "mlp"]
HOST_KINDS: tuple[HostKind, ...] = get_args(HostKind)

CLASSES = 5
IMAGE_SIDE = 8
SEQUENCE = 6
VOCABULARY = 11
FEATURES = 7

AT_ONCE = LifecycleConfig(min_prune_age=0, thresholds=GateThresholds(min_training_steps=0, min_holding_steps=0))
"""No waiting: gates ask only for what was measured."""


class HiddenSegment(Segment):
    """Linear → GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, outputs)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return F.gelu(self.linear(h)), {}


class ScoreSegment(Segment):
    """A score per class."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = Linear(inputs, classes)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.linear(h), {}


class MLPHost(Host):
    """Vectors (B, inputs) → scores (B, classes), with a vector slot `r0c<k>` after each hidden layer."""

    def __init__(self, inputs: int, widths: Sequence[int], classes: int) -> None:
        hidden = [HiddenSegment(*pair) for pair in zip((inputs, *widths), widths, strict=False)]
        slots = [
            SlotSpec(slot_id(0, index), width, "vector", position=(index + 1) / (len(widths) + 1))
            for index, width in enumerate(widths)
        ]
        super().__init__([*hidden, ScoreSegment(widths[-1], classes)], slots)


def make_host(kind: HostKind, *, dtype: torch.dtype = torch.float32, rng_seed: int = 0) -> Host:
    """A small host; its weights are a function of `rng_seed` alone. At least three slots each."""
    host: Host
    with torch.random.fork_rng(devices=[]):
        if kind == "cnn":
            host = CNNHost((6, 8), 3, classes=CLASSES, resolution=IMAGE_SIDE)
        elif kind == "gpt":
            host = GPTHost(layers=4, width=8, heads=2, block=SEQUENCE, vocab=VOCABULARY)
        else:
            host = MLPHost(FEATURES, (8, 6, 8), CLASSES)
    reset_parameters(host, rng_seed)
    return host.to(dtype)


def make_batch(
    kind: HostKind, size: int = 8, *, dtype: torch.dtype = torch.float32, rng_seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and targets. Noise, but a host can learn it by heart, and every target depends on its input."""
    generator = torch.Generator().manual_seed(rng_seed)
    if kind == "gpt":
        ids = torch.randint(VOCABULARY, (size, SEQUENCE + 1), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    shape = (size, 3, IMAGE_SIDE, IMAGE_SIDE) if kind == "cnn" else (size, FEATURES)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), x.flatten(1)[:, :CLASSES].argmax(-1)


def make_model(
    kind: HostKind,
    slots: int | None = None,
    *,
    isolation: Literal["shadow", "straight_through"] = "shadow",
    config: LifecycleConfig = AT_ONCE,
    budget: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> MorphogeneticModel:
    """A growing model with the first so many slots of its host (default: all)."""
    host = make_host(kind, dtype=dtype)
    ids = [spec.slot_id for spec in host.slots][:slots]
    return MorphogeneticModel(host, ids, isolation=isolation, config=config, budget=budget)


@torch.no_grad()
def shake(module: nn.Module, rng_seed: int, size: float = 0.3) -> None:
    """Move every parameter by noise, so that nothing is at the special value of its birth."""
    generator = torch.Generator().manual_seed(rng_seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.add_(noise.to(parameter.dtype), alpha=size)


def bring_to(
    model: MorphogeneticModel,
    slot_id: str,
    stage: SeedStage,
    batch: tuple[Tensor, Tensor],
    blueprint: str = "norm",
    *,
    style: str = "add",
    alpha: float = 1.0,
) -> None:
    """Germinate in slot `slot_id` and walk on to a live stage; `alpha` is where the seed acts from BLENDING on.

    Needs a lifecycle without waiting times (`AT_ONCE`). The seed's weights remain those of its birth.
    """
    model.germinate_seed(slot_id, blueprint, style=style, tempo=0, alpha_target=alpha)
    while model.seed_slots[slot_id].state.stage is not stage:
        model.observe_gradients({slot_id: 1.0})
        if model.seed_slots[slot_id].state.stage is SeedStage.HOLDING:
            model.measure(*batch, calibration=batch[0])
        model.advance(slot_id)
