"""Search with a stated number of episodes: candidates are halved while their hosts multiply; finalists meet anew.

Nothing here knows what a candidate is or how an episode runs: `evaluate` does. Hosts are numbers from 0 on. Whoever is
compared has been on the same hosts, so every comparison is paired; and what is run is counted before it runs.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, encode

Candidate = TypeVar("Candidate", bound=Hashable)
Evaluate = Callable[[Sequence[Candidate], Sequence[int]], list[list[float]]]
"""Objectives [candidate][host] of these candidates on the hosts of these numbers."""

LEAST_EPISODES = 16
"""Below it, shares of the budget round to nothing."""
FIRST_HOSTS = 4
"""Most hosts of a first look. Where hosts differ in kind, one of them would judge for all."""
FIRST_SHARE = 2 / 3
"""Most of a halving's episodes that the first look may take."""
KEPT = 2
"""Halving ends when the next half would be no more than this."""


@dataclass(frozen=True)
class Trial:
    """One candidate on some hosts. The hosts of all trials add up to the episodes that a search used."""

    stage: str
    candidate: Json
    hosts: tuple[int, ...]
    objective: float
    """Mean over these hosts, points."""


class Search(Generic[Candidate]):
    """A budget of episodes, what it was spent on, and what was found."""

    def __init__(self, evaluate: Evaluate[Candidate], budget: int, rng_seed: int) -> None:
        require_whole("episodes", budget, LEAST_EPISODES, remark="; fewer compare nothing")
        self.evaluate, self.budget, self.rng_seed = evaluate, budget, rng_seed
        self.used = 0
        self.log: list[Trial] = []
        self.found: dict[Candidate, dict[int, float]] = {}
        """Objective by candidate and host."""

    @property
    def left(self) -> int:
        """Episodes that may still be run."""
        return self.budget - self.used

    def rng(self, *place: str) -> random.Random:
        """A random stream of its own for every place."""
        return random.Random(derive_seed("tuning", self.rng_seed, *place))

    def halve(self, stage: str, candidates: Sequence[Candidate], episodes: int) -> list[Candidate]:
        """The survivors, best first: all candidates on few hosts, the better half on more, and so on.

        More candidates than the first look can pay are drawn from at random. Later rungs get equal shares of what the
        first look left; one that its share cannot pay is passed over, and the half is halved again.
        """
        episodes = min(episodes, self.left)
        first_look = max(1, int(FIRST_SHARE * episodes))
        alive = list(candidates)
        if len(alive) > first_look:
            alive = self.rng(stage, "draw").sample(alive, first_look)
        seen = min(FIRST_HOSTS, first_look // len(alive))
        self._try(stage, alive, range(seen))
        episodes -= len(alive) * seen
        sizes = _halves(len(alive))
        for rung, size in enumerate(sizes):
            more = episodes // (len(sizes) - rung) // size
            if more:
                alive = self.ranked(alive)[:size]
                self._try(stage, alive, range(seen, seen + more))
                seen, episodes = seen + more, episodes - size * more
        return self.ranked(alive)

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Best first, by mean over the hosts that all of them share; ties in the order given."""
        means = self.means(candidates)
        return sorted(candidates, key=lambda candidate: -means[candidate])

    def means(self, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        """Mean objective over the hosts that all of these share."""
        shared = set[int].intersection(*(set(self.found[candidate]) for candidate in candidates))
        if not shared:
            raise BadValueError(f"{len(candidates)} candidates that share no host cannot be compared")
        return {candidate: fmean(self.found[candidate][host] for host in shared) for candidate in candidates}

    def decide(self, finalists: Sequence[Candidate]) -> tuple[Candidate, float]:
        """The best of the finalists and its mean, on as many fresh hosts as the rest of the budget pays.

        Fresh, because whoever got this far was picked for its luck on the old ones too.
        """
        hosts = self.left // len(finalists)
        if not hosts:
            raise BadValueError(f"{self.left} of {self.budget} episodes are left for {len(finalists)} finalists")
        first = self._next_host()
        self._try("final", finalists, fresh := range(first, first + hosts))
        means = {one: fmean(self.found[one][host] for host in fresh) for one in finalists}
        best = max(finalists, key=lambda one: means[one])
        return best, means[best]

    def _next_host(self) -> int:
        return 1 + max((host for hosts in self.found.values() for host in hosts), default=-1)

    def _try(self, stage: str, candidates: Sequence[Candidate], hosts: range) -> None:
        """Run them, count them, note them."""
        cost = len(candidates) * len(hosts)
        assert cost <= self.left, f"{cost} episodes with {self.left} of {self.budget} left"
        self.used += cost
        for candidate, objectives in zip(candidates, self.evaluate(candidates, hosts), strict=True):
            self.found.setdefault(candidate, {}).update(zip(hosts, objectives, strict=True))
            self.log.append(Trial(stage, encode(candidate), tuple(hosts), fmean(objectives)))


def _halves(count: int) -> list[int]:
    """57 → 29, 15, 8, 4: rounded up, and no more than KEPT is left out."""
    sizes = []
    while (count := -(-count // 2)) > KEPT:
        sizes.append(count)
    return sizes
