"""What a controller can do: six ops, and the table of heads that make up an action.

Masks, buffers, log-probs, entropies, network heads and telemetry loop over the table. A new head is one line here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from esper.leyline.errors import UnknownNameError


class LifecycleOp(IntEnum):
    """The kind of a decision about one slot, or none."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


BLEND_STYLES = ("add", "multiply", "gate")
ALPHA_CURVES = ("linear", "cosine", "sigmoid6", "sigmoid12", "sigmoid24")

_WAIT, _GERMINATE, _SET_ALPHA, _PRUNE, _FOSSILIZE, _ADVANCE = LifecycleOp

Choices = tuple[LifecycleOp, ...] | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True)
class Head:
    """One factor of an action: its choices, the ops that use it, and its index for all other ops."""

    name: str
    choices: Choices | Literal["slots", "blueprints"]
    """The values by index, or the list that holds them: the host's slots, the slot's blueprints"""
    ops: tuple[LifecycleOp, ...]
    placeholder: int = 0

    def size(self, slots: int, blueprints: int) -> int:
        """Number of choices, given the number of slots and of blueprints."""
        if self.choices == "slots":
            return slots
        if self.choices == "blueprints":
            return blueprints
        return len(self.choices)


HEADS: tuple[Head, ...] = (
    Head("op", tuple(LifecycleOp), (_WAIT, _GERMINATE, _SET_ALPHA, _PRUNE, _FOSSILIZE, _ADVANCE)),
    Head("slot", "slots", (_GERMINATE, _SET_ALPHA, _PRUNE, _FOSSILIZE, _ADVANCE)),
    Head("blueprint", "blueprints", (_GERMINATE,)),
    Head("blend", BLEND_STYLES, (_GERMINATE,)),
    Head("tempo", (3, 5, 8), (_GERMINATE,)),
    Head("alpha_target", (0.5, 0.7, 1.0), (_GERMINATE, _SET_ALPHA), placeholder=2),
    Head("alpha_speed", (0, 3, 5, 8), (_SET_ALPHA, _PRUNE)),
    Head("alpha_curve", ALPHA_CURVES, (_SET_ALPHA, _PRUNE)),
)
HEAD_NAMES: tuple[str, ...] = tuple(head.name for head in HEADS)


def relevance(heads: tuple[Head, ...]) -> Mapping[LifecycleOp, frozenset[str]]:
    """The heads that each op uses. Raises RuntimeError unless the `op` head lists every op."""
    listed = {op for head in heads if head.name == "op" for op in head.ops}
    if forgotten := [op.name for op in LifecycleOp if op not in listed]:
        raise RuntimeError(f"the head table says nothing about {forgotten}: list each op in the row of head 'op'")
    return {op: frozenset(head.name for head in heads if op in head.ops) for op in LifecycleOp}


RELEVANCE = relevance(HEADS)


@dataclass(frozen=True)
class HeadPreset:
    """The heads and ops that a controller may use. Other heads stay at their placeholder."""

    name: str
    head_names: tuple[str, ...]
    ops: tuple[LifecycleOp, ...]
    commits_by_rule: bool = False  # seeds advance and are committed or pruned by a rule, in all slots at once

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads of this preset, in the order of the table."""
        return tuple(head for head in HEADS if head.name in self.head_names)


HEAD_PRESETS: Mapping[str, HeadPreset] = {
    "core": HeadPreset("core", ("op", "slot", "blueprint"), (_WAIT, _GERMINATE, _PRUNE, _FOSSILIZE, _ADVANCE)),
    "commit": HeadPreset("commit", ("op", "slot", "blueprint"), (_WAIT, _GERMINATE), commits_by_rule=True),
    "full": HeadPreset("full", HEAD_NAMES, tuple(LifecycleOp)),
}


def head_preset(name: str) -> HeadPreset:
    """The preset of that name."""
    if name not in HEAD_PRESETS:
        raise UnknownNameError("head preset", name, HEAD_PRESETS)
    return HEAD_PRESETS[name]
