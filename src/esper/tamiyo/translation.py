"""A policy on hosts with other slots and blueprints than its own: blueprints match by name, missing slots are padded.

A policy knows slots by their columns, so their number is free. It knows blueprints by name: one that the host does not
offer never fits, and one that the policy does not know is never chosen.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline import BadValueError, LifecycleOp, SlotConfig
from esper.tamiyo.features import ObservationLayout, signals_to_features
from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.signals import OfferView, SlotView, TrainingSignals


class Translation:
    """Turns the view of a host into a policy's own, and its actions back into those of the host."""

    def __init__(self, slots: SlotConfig, layout: ObservationLayout) -> None:
        """`layout` is the policy's, for at least as many slots as the host has."""
        if len(slots) > layout.slots:
            raise BadValueError(f"the host has {len(slots)} slots, the layout {layout.slots}; adapt the layout first")
        here, known = slots.blueprint_names, layout.vocabulary
        if not set(here) & set(known):
            raise BadValueError(
                f"the policy knows the blueprints {', '.join(known)}, but the slots offer {', '.join(here)}; train one "
                "with these"
            )
        self.layout, self.missing = layout, layout.slots - len(slots)
        self.same = here == known and not self.missing
        self._of_host = torch.tensor([here.index(name) if name in here else -1 for name in known])  # by index here
        # By index of the host, where the last one is −1: an empty slot.
        self._of_policy = torch.tensor([*(known.index(name) if name in known else -1 for name in here), -1])

    def features(self, signals: TrainingSignals) -> Tensor:
        """(N, layout.size): what the policy sees, before normalisation."""
        return signals_to_features(signals if self.same else self._translate(signals), self.layout)

    def masks(self, masks: Masks) -> Masks:
        """The policy's masks: what is legal for the host and known to the policy."""
        if self.same:
            return masks
        blueprint, slot = self._choose(masks["blueprint"], -1), self._pad(masks["slot"], 2)
        blueprint = self._pad(blueprint, 1)
        slot[:, LifecycleOp.GERMINATE] &= blueprint.any(-1)
        op = masks["op"] & slot.any(-1)
        op[:, LifecycleOp.WAIT] = masks["op"][:, LifecycleOp.WAIT]
        return {**masks, "op": op, "slot": slot, "blueprint": blueprint}

    def actions(self, actions: Tensor, table: ActionTable) -> Tensor:
        """Actions (N, heads) with the host's indices of blueprints."""
        if self.same:
            return actions
        translated, column = actions.clone(), table.index("blueprint")
        index = self._of_host.to(actions.device)[actions[:, column]]
        translated[:, column] = index.clamp(min=0)  # an unused head has a placeholder that the host may not know
        return translated

    def _translate(self, signals: TrainingSignals) -> TrainingSignals:
        index = signals.slots.blueprint
        renamed = self._of_policy.to(index.device)[index]
        slots: SlotView = _map(signals.slots._replace(blueprint=renamed), lambda part: self._pad(part, 1))
        offers = OfferView(*(self._pad(self._choose(part, -1), 1) for part in signals.offers))
        return signals._replace(slots=slots, offers=offers)

    def _choose(self, values: Tensor, axis: int) -> Tensor:
        """The policy's blueprints on an axis; zero or False for those that the host does not offer."""
        index = self._of_host.to(values.device)
        return values.index_select(axis, index.clamp(min=0)) * (index >= 0)

    def _pad(self, values: Tensor, axis: int) -> Tensor:
        """Zeros or False for the slots that the host lacks; −1 for indices, which stands for none."""
        if not self.missing:
            return values.clone()
        nothing = -1 if values.dtype == torch.long else 0
        return F.pad(values, [0, 0] * (values.dim() - axis - 1) + [0, self.missing], value=nothing)


def _map(tree: Any, change: Any) -> Any:  # Any: measurements in a view, one level at a time
    return change(tree) if isinstance(tree, Tensor) else type(tree)(*(_map(part, change) for part in tree))


def adapt(table: ActionTable, layout: ObservationLayout, slots: int) -> tuple[ActionTable, ObservationLayout]:
    """A policy's table and layout for another number of slots."""
    heads = tuple(replace(head, size=slots) if head.kind == "pointer" else head for head in table.heads)
    return ActionTable(heads), replace(layout, slots=slots)
