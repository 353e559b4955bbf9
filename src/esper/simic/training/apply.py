"""An action on one env: one verb of the fleet per op."""

from esper.leyline import HEADS, EsperError, LifecycleOp, SlotConfig
from esper.tamiyo import ActionTable
from esper.tolaria import HostFleet

_CHOICES = {head.name: head.choices for head in HEADS}


class IllegalActionError(EsperError, RuntimeError):
    """A policy did what its masks do not allow."""


def apply_action(fleet: HostFleet, env: int, action: list[int], table: ActionTable, slots: SlotConfig) -> LifecycleOp:
    """Carry out one action (an index per head); raises where the fleet refuses what the masks allowed."""
    chosen = dict(zip(table.names, action, strict=True))
    op = LifecycleOp(chosen["op"])
    slot_id = slots.slot_ids[chosen["slot"]]
    try:
        if op is LifecycleOp.GERMINATE:
            fleet.germinate(
                env,
                slot_id,
                slots.blueprint_names[chosen["blueprint"]],
                style=str(_value(chosen, "blend")),
                tempo=int(_value(chosen, "tempo")),
                alpha_target=float(_value(chosen, "alpha_target")),
            )
        elif op is LifecycleOp.ADVANCE:
            fleet.advance(env, slot_id)
        elif op is LifecycleOp.FOSSILIZE:
            fleet.fossilize(env, slot_id)
        elif op is LifecycleOp.PRUNE:
            steps, curve = int(_value(chosen, "alpha_speed")), str(_value(chosen, "alpha_curve"))
            fleet.prune(env, slot_id, steps=steps, curve=curve)
        elif op is LifecycleOp.SET_ALPHA_TARGET:
            fleet.set_alpha_target(
                env,
                slot_id,
                float(_value(chosen, "alpha_target")),
                steps=int(_value(chosen, "alpha_speed")),
                curve=str(_value(chosen, "alpha_curve")),
            )
    except EsperError as error:
        raise IllegalActionError(f"env {env}: {op.name} in {slot_id} was offered but refused: {error}") from error
    return op


def _value(chosen: dict[str, int], name: str) -> int | float | str:
    """The value behind a head's choice; the head's placeholder where the table lacks it."""
    head = next(head for head in HEADS if head.name == name)
    choices = _CHOICES[name]
    assert not isinstance(choices, str), "slots and blueprints are looked up by the caller"
    value: int | float | str = choices[chosen.get(name, head.placeholder)]
    return value
