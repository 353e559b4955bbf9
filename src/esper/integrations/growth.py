"""What the callbacks for all frameworks share: the options of their Grower, and what they log of a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from torch import Tensor

from esper.grower import GrowthRecord
from esper.grower.policies import OwnPolicy
from esper.grower.scoring import Forward, Loss


class GrowerOptions(TypedDict, total=False):
    """What a callback passes on to its `Grower`, which explains each."""

    budget: Required[int]
    steps: int
    """By default as often as the trainer will validate"""
    loss: Loss
    forward: Forward
    slots: Mapping[str, int] | Sequence[str] | Literal["auto"]
    policy: str | Path | OwnPolicy
    rng_seed: int
    folder: str | Path
    seed_options: Mapping[str, Any]  # Any: options of an optimizer


def metrics_of(record: GrowthRecord) -> dict[str, float]:
    """The numbers of a step, by the names under which loggers show them."""
    numbers: dict[str, float] = {"esper/step": record.step, "esper/grown_parameters": record.grown}
    if record.loss is not None:
        numbers["esper/loss"] = record.loss
    if record.accuracy is not None:
        numbers["esper/accuracy"] = record.accuracy
    for slot_id, measured in record.contributions.items():
        numbers[f"esper/contribution/{slot_id}"] = measured.value
    return numbers


def shape_of(value: object) -> str:
    """A short description of a value, for messages."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return type(value).__name__
