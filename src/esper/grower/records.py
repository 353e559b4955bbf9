"""What a grower tells its user: a record of every step, and a report for a policy of the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from esper.leyline import LifecycleOp, Measurement, SeedReport, StageChange
from esper.leyline.records import Json, decode, encode


class Action(NamedTuple):
    """One decision. A policy of the user's own returns a list of them; plain tuples do as well."""

    op: str
    """germinate, advance, fossilize or prune"""
    slot: str
    blueprint: str = ""
    """Of a germination"""


MOST_LISTED = 4  # slots that are named one by one
PAST = {"germinate": "germinated", "advance": "advanced", "fossilize": "committed", "prune": "pruned"}
OPS = {op.name.lower(): op for op in LifecycleOp}


@dataclass(frozen=True)
class GrowthRecord:
    """One call of `Grower.step`. Printed, it is one line."""

    step: int
    accuracy: float | None
    """Percent on the validation data, where the loss is cross-entropy"""
    loss: float | None
    """Mean validation loss"""
    actions: tuple[Action, ...] = ()
    changes: tuple[StageChange, ...] = ()
    """By timers, then by actions"""
    contributions: dict[str, Measurement] = field(default_factory=dict)
    """Points that silencing each seed would cost, with its error"""
    grown: int = 0
    """Parameters of all seeds"""
    budget: int = 0
    remarks: tuple[str, ...] = ()
    """What could not be measured or done, and why; or what was undone"""
    panic: str | None = None
    """NOT_FINITE or DIVERGENCE, if the model had diverged and its last step was restored"""
    choices: dict[str, dict[str, float]] = field(default_factory=dict)
    """What a learned policy chose among, by head, with probabilities"""

    def to_json(self) -> Json:
        """For other processes."""
        return encode(self)

    @classmethod
    def from_json(cls, content: Json) -> "GrowthRecord":
        """The record that `to_json` wrote."""
        actions = tuple(Action(*each) for each in content["actions"])
        changes = tuple(decode(StageChange, each, "change") for each in content["changes"])
        contributions = {slot_id: Measurement(*map(float, each)) for slot_id, each in content["contributions"].items()}
        rest = {**content, "actions": actions, "changes": changes, "contributions": contributions}
        loss = None if content["loss"] is None else float(content["loss"])  # JSON has no NaN, so it is a word
        return cls(**{**rest, "loss": loss, "remarks": tuple(content["remarks"])})

    def __str__(self) -> str:
        groups: dict[tuple[str, str], list[str]] = {}
        for action in self.actions:
            groups.setdefault((PAST[action.op], _named(action)), []).append(action.slot)
        done = [f"{past} {name} behind {place}" for (past, name), slots in groups.items() for place in listed(slots)]
        what = ", ".join(done) or "waited"
        return f"step {self.step}: {what} ({self.grown:,} of {self.budget:,})" + "".join(f"; {r}" for r in self.remarks)


def listed(slots: Sequence[str]) -> list[str]:
    """The slots, or their number if they are many."""
    return [f"{slots[0]} and {len(slots) - 1} others"] if len(slots) > MOST_LISTED else list(slots)


def _named(action: Action) -> str:
    return action.blueprint or "the seed"


class Offer(NamedTuple):
    """A blueprint that could be germinated in a slot now."""

    parameters: int
    worth: float
    """First-order worth relative to the best offer, 0 to 1"""


@dataclass(frozen=True)
class GrowthReport:
    """What a policy of the user's own decides on."""

    step: int
    steps: int
    budget_left: int
    accuracy: float | None
    loss: float | None
    slots: dict[str, SeedReport]
    offers: dict[str, dict[str, Offer]] = field(default_factory=dict)
    """By slot and blueprint; only what fits the slot and the budget"""
