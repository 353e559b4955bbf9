"""Tables for a host of three slots, and what policies see of it."""

from typing import Any

import torch
from torch import Tensor

from esper.leyline import BlueprintOffer, LifecycleOp, SlotConfig, SlotSpec, head_preset
from esper.tamiyo import growth_table
from esper.tamiyo.policies import Plan, PlannedSeed
from esper.tamiyo.policy import PolicyView
from esper.tamiyo.signals import CriticView, HostView, Measured, OfferView, SlotView, TrainingSignals

WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp
STEPS = 20
NAMES = ("norm", "conv", "attention")
OFFERS = tuple(BlueprintOffer(name, 1, 1, 10) for name in NAMES)
LAST_HAS_NO_ATTENTION = (OFFERS, OFFERS, OFFERS[:2])
SLOTS = SlotConfig(
    tuple(SlotSpec(f"r1c{c}", 8, "image", c / 2, blueprints=offers) for c, offers in enumerate(LAST_HAS_NO_ATTENTION))
)
TABLES = {preset: growth_table(head_preset(preset), SLOTS) for preset in ("core", "full")}
CORE, FULL = TABLES["core"], TABLES["full"]
LATER = Plan((PlannedSeed("r1c0", "conv", 6), PlannedSeed("r1c1", "norm", 0, 5), PlannedSeed("r1c2", "conv", 6)))

LONGS = {"last_op", "stage", "blueprint"}
BOOLS = {
    "last_succeeded",
    "ramping",
    "can_advance",
    "can_fossilize",
    "can_prune",
    "can_retarget",
    "valid",
    "fits",
    "present",
}
MEASURED = {"audition", "contribution", "seed_gradient", "best"}


def blank(kind: Any, *shape: int) -> Any:
    """A view of zeros; Any: one of the NamedTuples of signals."""
    columns: dict[str, Any] = {}
    for name in kind._fields:
        dtype = torch.long if name in LONGS else torch.bool if name in BOOLS else torch.float
        columns[name] = blank(Measured, *shape) if name in MEASURED else torch.zeros(shape, dtype=dtype)
    return kind(**columns)


def quiet(n: int, step: int = 10) -> TrainingSignals:
    """Nothing is measured, nothing grows, all offers look the same."""
    hosts, slots = blank(HostView, n), blank(SlotView, n, len(SLOTS))
    return TrainingSignals(
        hosts._replace(time_left=torch.full((n,), 1 - step / STEPS)),
        slots._replace(blueprint=slots.blueprint - 1, present=torch.ones_like(slots.ramping)),
        blank(OfferView, n, len(SLOTS), len(NAMES)),
        blank(CriticView, n),
    )


def a_view(signals: TrainingSignals, masks: dict[str, Tensor], step: int = 10) -> PolicyView:
    """Without features: no policy here looks at them."""
    return PolicyView(signals, torch.zeros(len(masks["op"]), 0), masks, step)
