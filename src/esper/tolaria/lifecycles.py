"""The lives of all seeds of many hosts: who is in which stage, and the verbs that change it, by env and slot."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from esper.kasmina import LifecycleConfig, SeedState, lifecycle
from esper.leyline import LIVE_STAGES, SeedReport, SlotSpec, StageChange, UnknownNameError


class Lifecycles(ABC):
    """States by env and slot. Weights are a subclass's business: it is told of births, deaths and changes."""

    def __init__(self, n: int, slots: Mapping[str, SlotSpec], config: LifecycleConfig, budget: int) -> None:
        """`budget` is how many parameters each env may grow."""
        self.n, self.slots, self.config, self.budget = n, dict(slots), config, budget
        self.begin()

    def begin(self) -> None:
        """All slots are empty."""
        self.states = [{slot_id: SeedState(slot_id) for slot_id in self.slots} for _ in range(self.n)]

    @abstractmethod
    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        """Build the seed that `state` speaks of."""

    @abstractmethod
    def uproot(self, env: int, slot_id: str) -> None:
        """Free the seed of a slot, if it has one; the state is the caller's business."""

    @abstractmethod
    def restructured(self, env: int, *, eased: bool) -> None:
        """The states of an env have changed; `eased`: a seed acts less than before, or no longer."""

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot of one env."""
        state, slot = self._state(env, slot_id), self.slots[slot_id]
        left = self.budget - self.grown_parameters(env)
        sown = lifecycle.sow(
            state, slot, blueprint, style=style, tempo=tempo, alpha_target=alpha_target, budget_left=left
        )
        self.plant(env, slot_id, sown)
        return self._settle(env, slot_id, sown, "germinate")

    def advance(self, env: int, slot_id: str) -> StageChange:
        """One transition forward."""
        return self._change(env, slot_id, "advance", lambda state: lifecycle.advance(state, self.config))

    def fossilize(self, env: int, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        return self._change(env, slot_id, "fossilize", lambda state: lifecycle.fossilize(state, self.config))

    def set_alpha_target(
        self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear"
    ) -> StageChange:
        """Send a HOLDING seed to another alpha in so many steps."""
        return self._change(
            env, slot_id, "set_alpha_target", lambda state: lifecycle.set_alpha_target(state, target, steps, curve)
        )

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Cut a seed, at once or by a ramp of so many steps."""
        return self._change(
            env, slot_id, "prune", lambda state: lifecycle.prune(state, self.config, steps=steps, curve=curve)
        )

    def tick(self) -> list[tuple[int, StageChange]]:
        """The end of a step for every env: counters, schedules, cooldowns, and what happens by itself."""
        changes: list[tuple[int, StageChange]] = []
        for env, states in enumerate(self.states):
            for slot_id, state in list(states.items()):
                after, found = lifecycle.tick(state, self.config)
                if after is not state:
                    self._replace(env, slot_id, after)
                changes += [(env, change) for change in found]
        return changes

    def check_env(self, env: int) -> None:
        """Refuse a number that is no env."""
        if not 0 <= env < self.n:
            raise UnknownNameError("env", env, [f"0 to {self.n - 1}"])

    def _state(self, env: int, slot_id: str) -> SeedState:
        self.check_env(env)
        if slot_id not in self.slots:
            raise UnknownNameError("slot", slot_id, self.slots)
        return self.states[env][slot_id]

    def _change(self, env: int, slot_id: str, cause: str, verb: Callable[[SeedState], SeedState]) -> StageChange:
        return self._settle(env, slot_id, verb(self._state(env, slot_id)), cause)

    def _settle(self, env: int, slot_id: str, after: SeedState, cause: str) -> StageChange:
        before = self.states[env][slot_id].stage
        self._replace(env, slot_id, after)
        return StageChange(slot_id, before, after.stage, cause)

    def _replace(self, env: int, slot_id: str, after: SeedState) -> None:
        before = self.states[env][slot_id]
        if after.stage not in LIVE_STAGES:
            self.uproot(env, slot_id)
        self.states[env][slot_id] = after
        self.restructured(env, eased=after.alpha < before.alpha)

    def adopt(self, env: int, states: Mapping[str, SeedState]) -> None:
        """These are the states of an env from now on; its weights and its seeds' are the caller's business."""
        self.states[env] = dict(states)
        self.restructured(env, eased=False)

    def grown_parameters(self, env: int) -> int:
        """Parameters of all seeds of one env."""
        self.check_env(env)
        return sum(lifecycle.seed_parameters(self.slots[slot_id], s) for slot_id, s in self.states[env].items())

    def reports(self, env: int) -> tuple[SeedReport, ...]:
        """The slots of one env as a controller sees them."""
        self.check_env(env)
        return tuple(
            lifecycle.report(state, lifecycle.seed_parameters(self.slots[slot_id], state))
            for slot_id, state in self.states[env].items()
        )
