"""Small networks, and masks and observations for them."""

from dataclasses import replace

import torch
from torch import Tensor

from esper.leyline import BlueprintOffer, LifecycleOp, SlotConfig, SlotSpec, head_preset
from esper.tamiyo import (
    ActionTable,
    Decision,
    FactoredRecurrentActorCritic,
    NetworkConfig,
    ObservationLayout,
    discrete_table,
    growth_table,
    vector_layout,
)
from esper.tamiyo.heads import Masks

SMALL = NetworkConfig(encoder=16, hidden=16, head=16)
SHARP = replace(SMALL, head_gain=3.0)
"""Far from uniform, so that differences show."""
NAMES = ("vector", "core1", "core3", "core10", "full1", "full3", "full10")
"""A plain vector with three choices, and both head presets on hosts of 1, 3 and 10 slots."""
OFFERS = tuple(BlueprintOffer(name, 1, 1, 10) for name in ("norm", "conv", "attention"))


def slots(count: int) -> SlotConfig:
    """So many slots that offer the same three blueprints."""
    return SlotConfig(tuple(SlotSpec(f"r0c{place}", 8, "image", 0.5, blueprints=OFFERS) for place in range(count)))


def layout(count: int) -> ObservationLayout:
    """Columns of every kind for so many slots."""
    offer, critic = ("audition", "valid"), ("potential", "control")
    return ObservationLayout(("time", "loss"), ("width", "stage", "alpha"), offer, critic, count, len(OFFERS))


def build(name: str, config: NetworkConfig = SMALL) -> FactoredRecurrentActorCritic:
    """The network of that name."""
    if name == "vector":
        return FactoredRecurrentActorCritic(discrete_table((4, 2, 3)), vector_layout(5), config)
    preset, count = name[:4], int(name[4:])
    return FactoredRecurrentActorCritic(growth_table(head_preset(preset), slots(count)), layout(count), config)


def random_masks(table: ActionTable, n: int, share: float = 0.5) -> dict[str, Tensor]:
    """Allow about this share, and only what can be completed to a legal action."""
    masks = {head.name: torch.rand(n, *table.mask_shape(head)) < share for head in table.heads}
    for head in table.heads:
        if head.given is None:
            masks[head.name][torch.arange(n), torch.randint(head.size, (n,))] = True
    if "slot" in masks:
        masks["slot"][:, LifecycleOp.GERMINATE] &= masks["blueprint"].any(-1)
        masks["op"][:, LifecycleOp.GERMINATE :] &= masks["slot"][:, LifecycleOp.GERMINATE :].any(-1)
        masks["op"][:, LifecycleOp.WAIT] |= ~masks["op"].any(-1)
    return masks


def decide(
    network: FactoredRecurrentActorCritic,
    flat: Tensor,
    masks: Masks | None = None,
    *,
    epsilon: float = 0.0,
    uniform: Tensor | None = None,
    actions: Tensor | None = None,
) -> Decision:
    """The first step of these observations; without masks everything is allowed."""
    encoded = network.encode(flat)
    core, _ = network.step(encoded.trunk, network.initial_state(len(flat)))
    masks = network.table.open_masks(len(flat)) if masks is None else masks
    return network.decide(core, encoded, masks, epsilon, uniform=uniform, actions=actions)
