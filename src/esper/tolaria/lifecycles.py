"""The lifecycles of all seeds of a growable: their stages, and the verbs that change them, by env and slot."""

from collections.abc import Mapping

from esper.kasmina import SeedState, lifecycle
from esper.leyline import ACTIVE_STAGES, LIVE_STAGES, SeedReport, SeedStage, StageChange, UnknownNameError
from esper.leyline.numbers import require_known
from esper.tolaria.growable import SeedOwner


class Lifecycles:
    """States by env and slot. The owner of the weights is told of births, deaths and changes."""

    def __init__(self, owner: SeedOwner) -> None:
        self.owner = owner
        self.states: list[dict[str, SeedState]] = []
        self.reset()

    def reset(self) -> None:
        """Empty all slots."""
        self.states[:] = [{slot_id: SeedState(slot_id) for slot_id in self.owner.slots} for _ in range(self.owner.n)]

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot of one env."""
        state, slot = self._state(env, slot_id), self.owner.slots[slot_id]
        left = self.owner.budget - self.grown_parameters(env)
        seed = lifecycle.germinate(
            state, slot, blueprint, style=style, tempo=tempo, alpha_target=alpha_target, budget_left=left
        )
        seed = lifecycle.act_at_once(seed) if self.owner.config.act_from_birth else seed
        self.owner.plant(env, slot_id, seed)
        return self._replace(env, slot_id, seed, "germinate")

    def advance(self, env: int, slot_id: str) -> StageChange:
        """One transition forward."""
        return self._replace(env, slot_id, lifecycle.advance(self._state(env, slot_id), self.owner.config), "advance")

    def fossilize(self, env: int, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        after = lifecycle.fossilize(self._state(env, slot_id), self.owner.config)
        return self._replace(env, slot_id, after, "fossilize")

    def set_alpha_target(
        self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear"
    ) -> StageChange:
        """Ramp the alpha of a HOLDING seed to `target` in `steps`."""
        after = lifecycle.set_alpha_target(self._state(env, slot_id), target, steps, curve)
        return self._replace(env, slot_id, after, "set_alpha_target")

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Remove a seed, at once or after a ramp of `steps`."""
        after = lifecycle.prune(self._state(env, slot_id), self.owner.config, steps=steps, curve=curve)
        return self._replace(env, slot_id, after, "prune")

    def tick(self) -> list[tuple[int, StageChange]]:
        """End a step for every env: counters, schedules, cooldowns, automatic changes of stage."""
        changes: list[tuple[int, StageChange]] = []
        for env, states in enumerate(self.states):
            for slot_id, state in list(states.items()):
                after, automatic = lifecycle.tick(state, self.owner.config)
                if after is not state:
                    self._replace(env, slot_id, after, "tick")
                changes += [(env, change) for change in automatic]
        return changes

    def check_env(self, env: int) -> None:
        """Refuse a number that is no env."""
        if not 0 <= env < self.owner.n:
            raise UnknownNameError("env", env, [f"0 to {self.owner.n - 1}"])

    def _state(self, env: int, slot_id: str) -> SeedState:
        self.check_env(env)
        require_known("slot", slot_id, self.owner.slots)
        return self.states[env][slot_id]

    def _replace(self, env: int, slot_id: str, after: SeedState, cause: str) -> StageChange:
        before = self.states[env][slot_id]
        if after.stage not in LIVE_STAGES:
            self.owner.uproot(env, slot_id)
        self.states[env][slot_id] = after
        self.owner.restructured(env, eased=after.alpha < before.alpha)
        return StageChange(slot_id, before.stage, after.stage, cause)

    def adopt(self, env: int, states: Mapping[str, SeedState]) -> None:
        """Replace the states of an env. The caller sets the weights."""
        self.states[env] = dict(states)
        self.owner.restructured(env, eased=False)

    def working(self) -> list[tuple[int, str, SeedState]]:
        """Every seed that trains or acts, with its env and slot, in this order."""
        return [
            (env, slot_id, state)
            for env, states in enumerate(self.states)
            for slot_id, state in states.items()
            if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES
        ]

    def grown_parameters(self, env: int) -> int:
        """Parameters of all seeds of one env."""
        self.check_env(env)
        return sum(lifecycle.seed_parameters(self.owner.slots[slot_id], s) for slot_id, s in self.states[env].items())

    def reports(self, env: int) -> tuple[SeedReport, ...]:
        """The slots of one env as a controller sees them."""
        self.check_env(env)
        return tuple(
            lifecycle.report(state, lifecycle.seed_parameters(self.owner.slots[slot_id], state))
            for slot_id, state in self.states[env].items()
        )
