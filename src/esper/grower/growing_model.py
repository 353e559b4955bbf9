"""One model in its user's loop as a `Growable` of one env."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from esper.grower import ranks
from esper.grower.averages import Averages
from esper.grower.container import ModelSlots
from esper.grower.membership import Membership
from esper.kasmina.layers import count_parameters
from esper.kasmina.lifecycle import LifecycleConfig, SeedState
from esper.leyline import LIVE_STAGES, SlotConfig, SlotSpec, derive_seed
from esper.tolaria.lifecycles import Lifecycles


@final
class GrowingModel:
    """The seeds of one model: their lifecycles, their modules, and their place in the user's optimizer."""

    n = 1

    def __init__(
        self, slots: ModelSlots, membership: Membership, *, budget: int, config: LifecycleConfig, rng_seed: int
    ) -> None:
        self.host, self.modules, self.membership = slots.host, slots, membership
        self.budget, self.config, self.rng_seed = budget, config, rng_seed
        self.averages = Averages(slots)
        self.slots: Mapping[str, SlotSpec] = {slot_id: slot.spec for slot_id, slot in slots.items()}
        self.slot_config = SlotConfig(tuple(self.slots.values()))
        own = {id(parameter) for parameter in slots.parameters()}
        self.host_parameters = sum(p.numel() for p in self.host.parameters() if id(p) not in own)
        self.progress = 0.0
        self.random_guess_loss = math.nan  # unit of losses: the first validation loss
        self.losses = torch.full((1,), torch.nan)  # a training loss is not seen from here
        lives = self.lifecycles = Lifecycles(self)
        self.states = lives.states
        self.germinate, self.advance, self.prune = lives.germinate, lives.advance, lives.prune
        self.fossilize, self.set_alpha_target, self.tick = lives.fossilize, lives.set_alpha_target, lives.tick
        self.grown_parameters, self.reports = lives.grown_parameters, lives.reports
        self.adopt_states()

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return next(self.host.parameters()).device

    def adopt_states(self) -> None:
        """Take the states of the slots, after a state dict was loaded."""
        self.states[0] = {slot_id: slot.state for slot_id, slot in self.modules.items()}
        self._sync()

    # -- called by the lifecycles -------------------------------------------------------------------------------------

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        """Build a seed."""
        slot = self.modules[slot_id]
        rng_seed = derive_seed(self.rng_seed, slot_id, state.germinations)
        slot.plant(state, rng_seed, like=self.host.get_parameter(self.modules.like[slot_id]))
        slot.train(self.host.training)
        ranks.reduce_gradients(slot)

    def uproot(self, env: int, slot_id: str) -> None:
        """Nothing to do: a slot frees its seed when it adopts the new state."""

    def restructured(self, env: int, eased: bool) -> None:
        """Let every slot adopt its state, and the optimizer its seeds."""
        for slot_id, state in self.states[0].items():
            self.modules[slot_id].settle(state)
        self._sync()

    def _sync(self) -> None:
        self.membership.sync(self.host, {slot_id: slot.parameters() for slot_id, slot in self.modules.live().items()})
        self.averages.sync()

    # -- what is in it ------------------------------------------------------------------------------------------------

    def live(self) -> dict[str, SeedState]:
        """Slots with a seed, and its state."""
        return {slot_id: state for slot_id, state in self.states[0].items() if state.stage in LIVE_STAGES}

    def gradient_norms(self) -> dict[str, Tensor]:
        """Norms of the gradients that live seeds hold now."""
        held = {
            slot_id: [p.grad for p in self.modules[slot_id].parameters() if p.grad is not None] for slot_id in self.live()
        }
        return {slot_id: nn.utils.get_total_norm(own) for slot_id, own in held.items() if own}


def seed_size(slots: ModelSlots) -> int:
    """Parameters of all seeds."""
    return count_parameters(slots)
