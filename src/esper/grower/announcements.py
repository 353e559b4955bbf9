"""What a Grower prints: where and how much it may grow, and at the end what it kept."""

from collections.abc import Sequence
from pathlib import Path

from esper.grower.growing_model import GrowingModel
from esper.grower.policies import OwnPolicy
from esper.grower.records import listed
from esper.grower.rules import LEAST_STEPS

UNKNOWN_STEPS = 20
"""Calls of `step` that growth is timed for if the user does not say"""


def introduction(growing: GrowingModel, steps: int | None, policy: str | Path | OwnPolicy) -> str:
    """The slots, the budget, and what may surprise."""
    named = ", ".join(f"{spec.slot_id} ({spec.topology}, width {spec.width})" for spec in growing.slots.values())
    share = 100 * growing.budget / growing.host_parameters
    lines = [
        f"Esper: slots behind {named}",
        f"Esper: budget {growing.budget:,}, {share:.1f} % of the model's {growing.host_parameters:,} parameters",
    ]
    if steps is None:
        lines.append(f"Esper: steps= is not given, so growth is timed for {UNKNOWN_STEPS} calls of step()")
    elif policy == "heuristic" and steps < LEAST_STEPS:
        lines.append(f"Esper: steps={steps} is too few to judge a seed, {LEAST_STEPS} are needed: nothing will grow")
    return "\n".join(lines)


def conclusion(growing: GrowingModel, kept: Sequence[str], dropped: Sequence[str]) -> str:
    """The seeds that stay, and those that do not."""

    def named(slot_ids: Sequence[str]) -> str:
        groups: dict[str | None, list[str]] = {}
        for slot_id in slot_ids:
            groups.setdefault(growing.states[0][slot_id].blueprint, []).append(slot_id)
        return ", ".join(f"{name} behind {place}" for name, own in groups.items() for place in listed(own))

    parameters = sum(p.numel() for slot_id in kept for p in growing.modules[slot_id].parameters())
    ending = f"; dropped {named(dropped)}" if dropped else ""
    return f"Esper: kept {named(kept) or 'nothing'} ({parameters:,} parameters){ending}"
