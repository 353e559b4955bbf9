"""What a policy chose, in words: indices of heads become ops, slots, blueprints and values."""

from collections.abc import Sequence

from esper.leyline import HEADS, Head, LifecycleOp, SlotConfig

Choice = str | int | float
Column = list[int] | list[Choice | None]


def decided(actions: Sequence[Sequence[int]], heads: Sequence[str], slots: SlotConfig) -> dict[str, Column]:
    """The decisions of one episode, column by column: `step` and every head, null where it says nothing about the op.

    Steps that waited are left out, because most do: a day of a large run writes a hundred thousand of these.
    """
    where, table = list(heads).index("op"), {head.name: head for head in HEADS}
    acted = [(step, action) for step, action in enumerate(actions) if action[where] != LifecycleOp.WAIT]
    columns: dict[str, Column] = {"step": [step for step, _ in acted]}
    for place, name in enumerate(heads):
        head = table[name]
        columns[name] = [
            _choice(head, action[place], slots) if action[where] in head.ops else None for _, action in acted
        ]
    return columns


def _choice(head: Head, index: int, slots: SlotConfig) -> Choice:
    """What an index of a head stands for."""
    if head.choices == "slots":
        return slots.slot_ids[index]
    if head.choices == "blueprints":
        return slots.blueprint_names[index]
    chosen = head.choices[index]
    return chosen.name if isinstance(chosen, LifecycleOp) else chosen
