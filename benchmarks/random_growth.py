"""A controller that knows nothing: one legal op on one slot, by dice."""

import random

from esper.leyline import EsperError, SeedStage
from esper.tolaria import HostFleet


def random_edit(fleet: HostFleet, env: int, dice: random.Random) -> None:
    """One op on one slot of an env, if it is legal there."""
    slot_id = dice.choice(list(fleet.slots))
    stage = fleet.states[env][slot_id].stage
    offers = [offer.name for offer in fleet.slots[slot_id].blueprints]
    try:
        if stage is SeedStage.DORMANT:
            fleet.germinate(env, slot_id, dice.choice(offers))
        elif stage is SeedStage.TRAINING:
            dice.choice([fleet.advance, fleet.prune])(env, slot_id)
        elif stage is SeedStage.HOLDING:
            dice.choice([fleet.fossilize, fleet.prune])(env, slot_id)
    except EsperError:
        return  # not legal just now: the env waits
