"""A search within a stated number of episodes: what it may spend, what it measured, halving and the final.

An episode is one grown host; controls are not counted, as in training. Hosts are numbered from 0. Episodes are counted
before they run.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, encode
from esper.simic.evaluation.arena import Lineups

Candidate = TypeVar("Candidate", bound=Hashable)
Evaluate = Callable[[Lineups[Candidate], Sequence[int]], list[list[float]]]  # objectives [host][candidate]
LEAST_EPISODES = 16  # with fewer, shares of the budget round to nothing
FIRST_HOSTS = 4  # most hosts in the first rung of a halving; one host alone could be of a rare kind
FIRST_SHARE = 2 / 3  # largest share of a halving's episodes for its first rung
FINALISTS = 2  # halving ends when the next half would be no more than this


@dataclass(frozen=True)
class Trial:
    """One candidate on some hosts. The hosts of all trials add up to the episodes used."""

    stage: str
    candidate: Json
    hosts: tuple[int, ...]
    objective: float  # mean over these hosts, points


class Search(Generic[Candidate]):
    """A budget of episodes, its log, and the objectives measured."""

    def __init__(self, evaluate: Evaluate[Candidate], budget: int, rng_seed: int, name: str = "") -> None:
        """`name`: tells apart searches of one seed, in random streams and in the log."""
        require_whole("episodes", budget, LEAST_EPISODES, remark="; fewer compare nothing")
        self.evaluate, self.budget, self.rng_seed, self.name = evaluate, budget, rng_seed, name
        self.used = 0
        self.log: list[Trial] = []
        self.objectives: dict[Candidate, dict[int, float]] = {}  # objective by candidate and host

    @property
    def left(self) -> int:
        """Episodes left."""
        return self.budget - self.used

    def rng(self, *names: str) -> random.Random:
        """The random stream of this name."""
        return random.Random(derive_seed("tuning", self.rng_seed, *([self.name] if self.name else []), *names))

    def fresh(self, count: int) -> range:
        """The next hosts that nothing was tried on."""
        first = 1 + max((host for hosts in self.objectives.values() for host in hosts), default=-1)
        return range(first, first + count)

    def halve(self, stage: str, candidates: Sequence[Candidate], episodes: int) -> list[Candidate]:
        """Run all candidates on few hosts, the better half on more, and so on. Returns the survivors, best first.

        The first rung draws at random those that it can pay for. Later rungs get equal shares of the rest."""
        episodes = min(episodes, self.left)
        first_rung = max(1, int(FIRST_SHARE * episodes))
        alive = list(candidates)
        if len(alive) > first_rung:
            alive = self.rng(stage, "draw").sample(alive, first_rung)
        seen = min(FIRST_HOSTS, first_rung // len(alive))
        self.play(stage, [alive] * seen, range(seen))
        episodes -= len(alive) * seen
        sizes = _halves(len(alive))
        for rung, size in enumerate(sizes):
            more = episodes // (len(sizes) - rung) // size
            if more:
                alive = self.ranked(alive)[:size]
                self.play(stage, [alive] * more, range(seen, seen + more))
                seen, episodes = seen + more, episodes - size * more
        return self.ranked(alive)

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Sort by the mean over the hosts that all of them share, best first; ties in the order given."""
        shared = set[int].intersection(*(set(self.objectives[candidate]) for candidate in candidates))
        assert shared, "candidates without a common host cannot be compared"
        return sorted(candidates, key=lambda candidate: -fmean(self.objectives[candidate][host] for host in shared))

    def decide(self, finalists: Sequence[Candidate]) -> tuple[Candidate, float]:
        """The best on as many fresh hosts as the budget allows, and its mean. Luck on earlier hosts does not count."""
        hosts = self.left // len(finalists)
        if not hosts:
            raise BadValueError(f"{self.left} of {self.budget} episodes are left for {len(finalists)} finalists")
        self.play("final", [finalists] * hosts, fresh := self.fresh(hosts))
        means = {one: fmean(self.objectives[one][host] for host in fresh) for one in finalists}
        best = max(finalists, key=lambda one: means[one])
        return best, means[best]

    def play(self, stage: str, lineups: Lineups[Candidate], hosts: Sequence[int]) -> None:
        """Try every host's candidates on it."""
        cost = sum(len(lineup) for lineup in lineups)
        assert cost <= self.left, f"{cost} episodes with {self.left} of {self.budget} left"
        self.used += cost
        tried: dict[Candidate, dict[int, float]] = {}
        for host, lineup, objectives in zip(hosts, lineups, self.evaluate(lineups, hosts), strict=True):
            for candidate, value in zip(lineup, objectives, strict=True):
                tried.setdefault(candidate, {})[host] = value
        for candidate, by_host in tried.items():
            self.objectives.setdefault(candidate, {}).update(by_host)
            label = f"{self.name}: {stage}" if self.name else stage
            self.log.append(Trial(label, encode(candidate), tuple(by_host), fmean(by_host.values())))


def _halves(count: int) -> list[int]:
    """57 → 29, 15, 8, 4: rounded up, and larger than FINALISTS."""
    sizes = []
    while (count := -(-count // 2)) > FINALISTS:
        sizes.append(count)
    return sizes
