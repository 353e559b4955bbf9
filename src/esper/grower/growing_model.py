"""One model in its user's loop as a `Growable` of one env."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.grower import ranks
from esper.grower.averages import Averages
from esper.grower.container import CHILD, ModelSlots
from esper.grower.membership import Membership
from esper.kasmina.compare import RowScore
from esper.kasmina.layers import Linear, Scale, SelfAttention
from esper.kasmina.lifecycle import LifecycleConfig, SeedState
from esper.leyline import LIVE_STAGES, BadValueError, SlotConfig, SlotSpec, derive_seed, relative_gain
from esper.tolaria.lifecycles import Lifecycles


@final
class GrowingModel:
    """The seeds of one model: their lifecycles, their modules, and their place in the user's optimizer."""

    n = 1

    def __init__(
        self, modules: ModelSlots, membership: Membership, *, budget: int, config: LifecycleConfig, rng_seed: int
    ) -> None:
        self.host, self.modules, self.membership = modules.host, modules, membership
        self.budget, self.config, self.rng_seed = budget, config, rng_seed
        self.slots: Mapping[str, SlotSpec] = {slot_id: slot.spec for slot_id, slot in modules.items()}
        self.slot_config = SlotConfig(tuple(self.slots.values()))
        own = {id(parameter) for parameter in modules.parameters()}
        self.host_parameters = sum(p.numel() for p in self.host.parameters() if id(p) not in own)
        self.progress = 0.0
        self.random_guess_loss = math.nan  # the first validation loss: the unit of all others
        self.losses = torch.full((1,), torch.nan)  # the training loss is not seen from here
        self.arrivals: dict[str, int] = {}
        """Gradients that reached each seed since the last step"""
        self._counters: list[RemovableHandle] = []
        self._averages = Averages(modules)
        lives = self.lifecycles = Lifecycles(self)
        self.states = lives.states
        self.germinate, self.advance, self.prune = lives.germinate, lives.advance, lives.prune
        self.fossilize, self.set_alpha_target, self.tick = lives.fossilize, lives.set_alpha_target, lives.tick
        self.grown_parameters, self.reports = lives.grown_parameters, lives.reports
        self.adopt_states()

    def host_size(self, env: int) -> int:
        """Parameters of the model without seeds."""
        return self.host_parameters

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return next(self.host.parameters()).device

    def points(self, rows: Sequence[RowScore]) -> Tensor:
        """Accuracy in percent, or by how many percent the loss is below the first one."""
        scores = [
            row.accuracy if row.correct is not None else relative_gain(self.random_guess_loss, row.loss) for row in rows
        ]
        return torch.tensor(scores, device=self.device)

    def adopt_states(self) -> None:
        """Take the states of the slots, after a state dict was loaded."""
        self.states[0] = {slot_id: slot.state for slot_id, slot in self.modules.items()}
        self._sync()

    # -- called by the lifecycles -------------------------------------------------------------------------------------

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        """Build a seed that is silent, but ready to learn."""
        slot = self.modules[slot_id]
        rng_seed = derive_seed(self.rng_seed, slot_id, state.germinations)
        slot.plant(state, rng_seed, like=self.host.get_parameter(self.modules.like[slot_id]))
        assert slot.seed is not None
        silence_by_last_layer(slot.seed)
        slot.train(self.host.training)

    def uproot(self, env: int, slot_id: str) -> None:
        """Nothing to do: a slot frees its seed when it adopts the new state."""

    def restructured(self, env: int, *, eased: bool) -> None:
        """Let every slot adopt its state, and the optimizer its seeds."""
        for slot_id, state in self.states[0].items():
            self.modules[slot_id].settle(state)
        self._sync()

    def _sync(self) -> None:
        live = self.modules.live()
        self.membership.sync(self.host, {slot_id: slot.parameters() for slot_id, slot in live.items()})
        self._averages.sync()
        for slot_id, slot in live.items():
            assert slot.seed is not None
            if not hasattr(slot.seed, "_watched"):
                slot.seed._watched = True  # type: ignore[assignment]  # a mark of ours
                self.arrivals[slot_id] = 0
                ranks.average_gradients(slot)
                counter = GradientCounter(self.arrivals, slot_id)
                self._counters.append(next(slot.parameters()).register_post_accumulate_grad_hook(counter))
        ranks.leave_out(self.host, (name for name, _ in self.modules.named_parameters(prefix=CHILD)))

    def release(self) -> None:
        """Stop counting gradients, at the end of growth."""
        for counter in self._counters:
            counter.remove()
        ranks.leave_out(self.host, ())

    # -- what is in it ------------------------------------------------------------------------------------------------

    def live(self) -> dict[str, SeedState]:
        """Slots with a seed, and its state."""
        return {slot_id: state for slot_id, state in self.states[0].items() if state.stage in LIVE_STAGES}

    def check_learning(self, passes: int) -> None:
        """Raise if a seed that acted during `passes` training passes got no gradient, or was never updated."""
        by_another = self.membership.updated_by_another()
        for slot_id, state in self.live().items():
            arrived, self.arrivals[slot_id] = self.arrivals[slot_id], 0
            if passes == 0:
                continue
            label = f"the {state.blueprint} seed behind {slot_id!r}"
            if arrived == 0:
                raise BadValueError(
                    f"{label} got no gradient in {passes} training passes: the model was compiled before the Grower "
                    "was built, a copy of it is trained, or the loss does not depend on that submodule"
                )
            seed = self.modules[slot_id].seed
            assert seed is not None
            silent = born_zero(seed)
            if by_another and silent and not any(bool(parameter.any()) for parameter in silent):
                raise BadValueError(
                    f"{label} got gradients but was never updated: pass the Grower the optimizer that your loop steps"
                )


def last_linear(seed: nn.Module) -> Linear | None:
    """The linear layer directly in front of a seed's final scale, if there is one."""
    if not isinstance(seed, nn.Sequential) or len(seed) < 2 or not isinstance(seed[-1], Scale):
        return None
    last = seed[-2].out if isinstance(seed[-2], SelfAttention) else seed[-2]
    return last if isinstance(last, Linear) else None


@torch.no_grad()
def silence_by_last_layer(seed: nn.Module) -> None:
    """Let the last linear layer of a newborn be zero instead of its scale.

    The output is zero either way. Under a zero scale, the layers inside get no gradient at first and small ones for
    long, as their scale opens by one learning rate per minibatch. A zero layer under a scale of one learns at full rate
    at once. Reduced runs of `benchmarks/own_models.py` show what it is worth. The regression's test loss fell by
    1.0 ± 0.2 %, and the MLP gained 0.4 ± 0.3 points (six seeds that were not used to choose it). The GPT's loss fell by
    0.9 ± 0.4 % (three seeds). Seeds that end in a norm or a nonlinearity keep the zero scale: behind a zero norm, a
    ReLU would never open.
    """
    if (last := last_linear(seed)) is not None:
        for parameter in last.parameters():
            parameter.zero_()
        for part in seed.modules():
            if isinstance(part, Scale):
                part.weight.fill_(1)


def born_zero(seed: nn.Module) -> list[Tensor]:
    """The parameters that silence a newborn."""
    if (last := last_linear(seed)) is not None:
        return list(last.parameters())
    return [part.weight for part in seed.modules() if isinstance(part, Scale)]


class GradientCounter:
    """A hook that counts the gradients of one seed. A copy of the model has none."""

    def __init__(self, counts: dict[str, int], slot_id: str) -> None:
        self.counts, self.slot_id = counts, slot_id

    def __call__(self, parameter: Tensor) -> None:
        self.counts[self.slot_id] = self.counts.get(self.slot_id, 0) + 1
