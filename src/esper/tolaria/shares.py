"""A fleet that several learners share: each has a range of its envs, and the fleet trains all of them at once.

What concerns all envs, such as a training step, is a *call*: a share asks for it, and it is carried out once all shares
have asked. On the CPU the bits of an env depend neither on the other envs nor on their number, so each learner gets
what a fleet of its own would have given.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from esper.kasmina import SeedState
from esper.kasmina.compare import Comparison, RowScore
from esper.leyline import StageChange
from esper.tolaria.fleet import HostFleet
from esper.tolaria.governor import Panic
from esper.tolaria.measurement import Sensing, Taps


class Call(NamedTuple):
    """What one share asks of the whole fleet."""

    share: "FleetShare"
    name: str
    argument: Any  # of that call


Ask = Callable[[Call], Any]  # waits until the call was carried out; returns this share's part of the result


class SharedFleet:
    """The fleet behind the shares; carries out their calls."""

    def __init__(self, fleet: HostFleet, sizes: Sequence[int]) -> None:
        """`sizes`: the number of envs of each share."""
        self.fleet, self._prober = fleet, fleet.prober()
        self.ranges = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self._comparisons: list[Comparison] = []

    def carry_out(self, name: str, arguments: Mapping[range, Any]) -> dict[range, Any]:
        """Carry out a call with the arguments of some shares. Returns their parts of the result.

        Envs of other shares keep their seeds; nobody looks at them.
        """
        of_share: Callable[[range], Any] = getattr(self, f"_{name}")(arguments)
        return {envs: of_share(envs) for envs in arguments}

    def _reset(self, arguments: Mapping[range, Sequence[int]]) -> Callable[[range], None]:
        seeds = list(self.fleet.seeds)
        for envs, own in arguments.items():
            seeds[envs.start : envs.stop] = own
        self.fleet.reset(seeds)
        return lambda envs: None

    def _train_step(self, arguments: Mapping[range, None]) -> Callable[[range], Tensor]:
        losses = self.fleet.train_step()
        return lambda envs: losses[envs.start : envs.stop]

    def _validate(self, arguments: Mapping[range, bool]) -> Callable[[range], list[Comparison]]:
        found = self._comparisons = self.fleet.validate(deployed=any(arguments.values()))
        return lambda envs: found[envs.start : envs.stop]

    def _validate_committed(self, arguments: Mapping[range, bool]) -> Callable[[range], list[RowScore]]:
        found = self.fleet.validate_committed(final=all(arguments.values()))
        return lambda envs: found[envs.start : envs.stop]

    def _govern(self, arguments: Mapping[range, Sequence[Comparison]]) -> Callable[[range], list[Panic]]:
        comparisons = list(self._comparisons)
        for envs, own in arguments.items():
            comparisons[envs.start : envs.stop] = own
        panics = self.fleet.govern(comparisons)
        return lambda envs: [Panic(each.env - envs.start, each.symptoms) for each in panics if each.env in envs]

    def _tick(self, arguments: Mapping[range, None]) -> Callable[[range], list[tuple[int, StageChange]]]:
        changes = self.fleet.tick()
        return lambda envs: [(env - envs.start, change) for env, change in changes if env in envs]

    def _probe(self, arguments: Mapping[range, None]) -> Callable[[range], Sensing]:
        taps = self._prober.next_taps()
        if self.fleet.device.type == "cpu":
            return lambda envs: self._prober.sense_rows(_copied(taps, envs), range(len(envs)))
        sensing = self._prober.sense_rows(taps, range(self.fleet.n))
        return lambda envs: Sensing(*(column[envs.start : envs.stop] for column in sensing))


def _copied(taps: Taps, envs: range) -> Taps:
    """The taps of some envs, laid out as those of a fleet of their own: what is summed there depends on it in the last
    bits."""
    rows = slice(envs.start, envs.stop)
    streams, gradients = ([part[rows].clone() for part in parts] for parts in (taps.streams, taps.gradients))
    return Taps(streams, gradients, taps.conductance[rows].clone())


class FleetShare:
    """Some envs of a fleet, numbered from 0. Episode runners use it as they use a `HostFleet`."""

    def __init__(self, shared: SharedFleet, envs: range, ask: Ask) -> None:
        """`ask` hands a call over and waits for its result."""
        self.shared, self.envs, self._ask = shared, envs, ask
        fleet = self._fleet = shared.fleet
        self.n, self.task, self.device, self.isolation = len(envs), fleet.task, fleet.device, fleet.isolation
        self.slots, self.slot_config, self.config, self.budget = (
            fleet.slots,
            fleet.slot_config,
            fleet.config,
            fleet.budget,
        )
        self.random_guess_loss, self.points = fleet.random_guess_loss, fleet.points

    # -- calls of the whole fleet -------------------------------------------------------------------------------------

    def reset(self, seeds: Sequence[int]) -> None:
        """Start a new episode with fresh hosts of these seeds."""
        self._ask(Call(self, "reset", seeds))

    def train_step(self) -> Tensor:
        """Train one step; returns the mean losses (n,)."""
        losses: Tensor = self._ask(Call(self, "train_step", None))
        return losses

    def validate(self, *, deployed: bool = True) -> list[Comparison]:
        """Score main rows, auditions and contributions."""
        found: list[Comparison] = self._ask(Call(self, "validate", deployed))
        return found

    def validate_committed(self, *, final: bool = False) -> list[RowScore]:
        """Score every host with its fossils alone."""
        found: list[RowScore] = self._ask(Call(self, "validate_committed", final))
        return found

    def govern(self, comparisons: Sequence[Comparison]) -> list[Panic]:
        """Restore the snapshots of envs that panic, then take new ones."""
        panics: list[Panic] = self._ask(Call(self, "govern", comparisons))
        return panics

    def tick(self) -> list[tuple[int, StageChange]]:
        """End a step for every env."""
        changes: list[tuple[int, StageChange]] = self._ask(Call(self, "tick", None))
        return changes

    def prober(self) -> Callable[[], Sensing]:
        """What probes the slots of these envs."""
        return lambda: self._ask(Call(self, "probe", None))

    # -- its own envs -------------------------------------------------------------------------------------------------

    @property
    def seeds(self) -> list[int]:
        """One per env."""
        return self._fleet.seeds[self.envs.start : self.envs.stop]

    @property
    def states(self) -> list[dict[str, SeedState]]:
        """States of the seeds by env and slot."""
        return self._fleet.states[self.envs.start : self.envs.stop]

    @property
    def losses(self) -> Tensor:
        """Training losses of the last step (n,)."""
        return self._fleet.losses[self.envs.start : self.envs.stop]

    @property
    def step_index(self) -> int:
        """Steps of the episode that are done."""
        return self._fleet.step_index

    @property
    def progress(self) -> float:
        """Share of the episode that is done."""
        return self._fleet.progress

    def host_size(self, env: int) -> int:
        """Parameters of an env's host without seeds."""
        return self._fleet.host_size(self.envs[env])

    def grown_parameters(self, env: int) -> int:
        """Parameters of all seeds of one env."""
        return self._fleet.grown_parameters(self.envs[env])

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot of one env."""
        chosen = self.envs[env]
        return self._fleet.germinate(chosen, slot_id, blueprint, style=style, tempo=tempo, alpha_target=alpha_target)

    def advance(self, env: int, slot_id: str) -> StageChange:
        """One transition forward."""
        return self._fleet.advance(self.envs[env], slot_id)

    def fossilize(self, env: int, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        return self._fleet.fossilize(self.envs[env], slot_id)

    def set_alpha_target(
        self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear"
    ) -> StageChange:
        """Ramp the alpha of a HOLDING seed to `target` in `steps`."""
        return self._fleet.set_alpha_target(self.envs[env], slot_id, target, steps=steps, curve=curve)

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Remove a seed, at once or after a ramp of `steps`."""
        return self._fleet.prune(self.envs[env], slot_id, steps=steps, curve=curve)
