"""Tables of gains in place of hosts, so that searches can be compared in seconds.

Each cell (slot × blueprint) has a gain that fades if it is germinated late. Seeds of a plan add up until they saturate;
pairs of cells have terms of their own; rent is subtracted. Hosts are of one or several kinds, and objectives have noise
of the host and of the trial. Everything follows from the number of the world.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

import numpy as np

from esper.leyline import derive_seed, rent
from esper.simic.evaluation.yardsticks import extensions
from esper.tamiyo.policies import Plan
from esper.tolaria import Task, get_task

Cell = tuple[str, str]
BEAM = 12  # plans that `best` extends


@dataclass(frozen=True)
class Kind:
    """What seeds gain on the hosts of one kind."""

    gains: dict[Cell, float]
    fading: dict[Cell, tuple[float, ...]]  # share of the gain that is left, by the number of the germination time
    pairs: dict[frozenset[Cell], float]


@dataclass(frozen=True)
class World:
    """A task's plans with made-up gains. Called with lineups and hosts, it returns objectives [host][candidate]."""

    number: int
    task: Task
    top: float  # points of the best seeds
    kinds: int = 1  # of hosts; of several, the second needs nothing
    saturates: bool = True
    pair: float = 1.0  # standard deviations: of pair terms …
    host: float = 6.0  # … of what all plans on a host share …
    rest: float = 6.5  # … and of a trial

    def __call__(self, lineups: Sequence[Sequence[Plan]], hosts: Sequence[int]) -> list[list[float]]:
        return [
            [self.gain(plan, self.tables[derive_seed(self.number, "kind", host) % self.kinds]) + self.noise(plan, host)
             for plan in lineup]
            for lineup, host in zip(lineups, hosts, strict=True)
        ]  # fmt: skip

    def noise(self, plan: Plan, host: int) -> float:
        """Noise of a trial, and of its host."""
        return self.host * _normal(self.number, host) + self.rest * _normal(self.number, host, repr(plan))

    @cached_property
    def sizes(self) -> dict[Cell, int]:
        """Parameters by cell."""
        slots = self.task.slot_config.slots
        return {(slot.slot_id, offer.name): offer.parameters for slot in slots for offer in slot.blueprints}

    @cached_property
    def tables(self) -> list[Kind]:
        """One table per kind of host."""
        dice = np.random.default_rng(self.number)
        return [self._table(dice, 0.01 if number == 1 else 1.0) for number in range(self.kinds)]

    def _table(self, dice: np.random.Generator, strength: float) -> Kind:
        slots = dict(zip(self.task.slot_ids, dice.permutation([1.0, 0.45, 0.1]), strict=True))
        blueprints = {
            name: float(np.clip(dice.normal(0.35, 0.5), -0.05, 1.0)) for name in sorted({b for _, b in self.sizes})
        }
        return Kind(
            {
                (slot, name): strength
                * self.top
                * (slots[slot] * blueprints[name] * math.exp(dice.normal(0, 0.2)) + dice.normal(0, 0.01))
                for slot, name in self.sizes
            },
            {cell: (1.0, dice.uniform(0.85, 1.0), dice.uniform(0.5, 0.85)) for cell in self.sizes},
            {frozenset((a, b)): dice.normal(0, self.pair) for a in self.sizes for b in self.sizes if a[0] < b[0]},
        )

    def gain(self, plan: Plan, kind: Kind) -> float:
        """The true objective of a plan on hosts of one kind."""
        times = (0, self.task.steps // 4, self.task.steps // 2)
        cells = [(seed.slot, seed.blueprint) for seed in plan.seeds]
        whens = [times.index(seed.germinate_at) for seed in plan.seeds]
        gain = sum(kind.gains[cell] * kind.fading[cell][when] for cell, when in zip(cells, whens, strict=True))
        if self.saturates and gain > 0:
            gain = 1.1 * self.top * math.tanh(gain / (1.1 * self.top))
        gain += sum(kind.pairs[frozenset((a, b))] for number, a in enumerate(cells) for b in cells[:number])
        return gain - rent(float(sum(self.sizes[cell] for cell in cells)), self.task.host_parameters)

    def worth(self, plan: Plan) -> float:
        """The true mean objective of a plan."""
        return fmean(self.gain(plan, kind) for kind in self.tables) if plan.seeds else 0.0

    def regret(self, plan: Plan) -> float:
        """Points that a plan lacks to the best one, which a wide beam finds."""
        beam, best = [Plan()], 0.0
        while longer := [more for one in beam if len(one.seeds) < 3 for more in extensions(one, self.task)]:
            beam = sorted(longer, key=self.worth, reverse=True)[:BEAM]
            best = max(best, self.worth(beam[0]))
        return best - self.worth(plan)


def _normal(*place: int | str) -> float:
    return NormalDist().inv_cdf((derive_seed("noise", *place) % 2**52 + 0.5) / 2**52)


def blind_world(number: int) -> World:
    """Large gains that saturate; a deviation of 9 points."""
    return World(number, get_task("digits_blind"), top=40.0)


def varied_world(number: int) -> World:
    """Three kinds of hosts and a small parameter budget."""
    return World(number, get_task("digits_varied"), top=40.0, kinds=3, host=2.0, rest=3.0)


def small_world(number: int) -> World:
    """Small gains that add up."""
    return World(number, get_task("cifar_baseline"), top=2.5, saturates=False, pair=0.2, host=0.3, rest=0.5)


WORLDS = {"blind": blind_world, "varied": varied_world, "small": small_world}
