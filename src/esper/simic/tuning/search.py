"""Searches with a stated number of episodes: successive halving, then a final on fresh hosts.

`Search` does not know what a candidate is or how an episode runs; `evaluate` does. Hosts are numbered from 0. All
comparisons are on the same hosts, and episodes are counted before they run.
"""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Generic, TypeVar

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json, encode
from esper.simic.evaluation.yardsticks import extensions, one_seed_plans
from esper.tamiyo.policies import HeuristicConfig, Plan
from esper.tamiyo.policies.heuristic import OFFER_CHOICES
from esper.tamiyo.policies.open_loop import MAX_SEEDS
from esper.tolaria import Task

Candidate = TypeVar("Candidate", bound=Hashable)
Evaluate = Callable[[Sequence[Candidate], Sequence[int]], list[list[float]]]
"""Objectives [candidate][host] of these candidates on the hosts of these numbers."""

LEAST_EPISODES = 16
"""With fewer, shares of the budget round to nothing."""
FIRST_HOSTS = 4
"""Most hosts in the first rung of a halving. One host alone could be of a rare kind."""
FIRST_SHARE = 2 / 3
"""Largest share of a halving's episodes for its first rung."""
FINALISTS = 2
"""Halving ends when the next half would be no more than this."""


@dataclass(frozen=True)
class Trial:
    """One candidate on some hosts. The hosts of all trials add up to the episodes used."""

    stage: str
    candidate: Json
    hosts: tuple[int, ...]
    objective: float
    """Mean over these hosts, points."""


class Search(Generic[Candidate]):
    """A budget of episodes, its log, and the objectives measured."""

    def __init__(self, evaluate: Evaluate[Candidate], budget: int, rng_seed: int) -> None:
        require_whole("episodes", budget, LEAST_EPISODES, remark="; fewer compare nothing")
        self.evaluate, self.budget, self.rng_seed = evaluate, budget, rng_seed
        self.used = 0
        self.log: list[Trial] = []
        self.objectives: dict[Candidate, dict[int, float]] = {}
        """Objective by candidate and host."""

    @property
    def left(self) -> int:
        """Episodes that may still be run."""
        return self.budget - self.used

    def rng(self, *names: str) -> random.Random:
        """The random stream of this name."""
        return random.Random(derive_seed("tuning", self.rng_seed, *names))

    def halve(self, stage: str, candidates: Sequence[Candidate], episodes: int) -> list[Candidate]:
        """Run all candidates on few hosts, the better half on more, and so on. Returns the survivors, best first.

        If there are more candidates than the first rung can pay for, it draws some at random. Later rungs get equal
        shares of the rest; a rung that its share cannot pay for is skipped.
        """
        episodes = min(episodes, self.left)
        first_rung = max(1, int(FIRST_SHARE * episodes))
        alive = list(candidates)
        if len(alive) > first_rung:
            alive = self.rng(stage, "draw").sample(alive, first_rung)
        seen = min(FIRST_HOSTS, first_rung // len(alive))
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
        """Sort by the mean over the hosts that all of them share, best first; ties in the order given."""
        shared = set[int].intersection(*(set(self.objectives[candidate]) for candidate in candidates))
        assert shared, "candidates without a common host cannot be compared"
        return sorted(candidates, key=lambda candidate: -fmean(self.objectives[candidate][host] for host in shared))

    def decide(self, finalists: Sequence[Candidate]) -> tuple[Candidate, float]:
        """Run the finalists on as many fresh hosts as the budget allows. Returns the best one and its mean.

        Fresh, because the finalists were selected for their luck on the earlier hosts too.
        """
        hosts = self.left // len(finalists)
        if not hosts:
            raise BadValueError(f"{self.left} of {self.budget} episodes are left for {len(finalists)} finalists")
        first = 1 + max((host for hosts in self.objectives.values() for host in hosts), default=-1)
        self._try("final", finalists, fresh := range(first, first + hosts))
        means = {one: fmean(self.objectives[one][host] for host in fresh) for one in finalists}
        best = max(finalists, key=lambda one: means[one])
        return best, means[best]

    def _try(self, stage: str, candidates: Sequence[Candidate], hosts: range) -> None:
        """Run candidates on hosts, count the episodes, log the objectives."""
        cost = len(candidates) * len(hosts)
        assert cost <= self.left, f"{cost} episodes with {self.left} of {self.budget} left"
        self.used += cost
        for candidate, objectives in zip(candidates, self.evaluate(candidates, hosts), strict=True):
            self.objectives.setdefault(candidate, {}).update(zip(hosts, objectives, strict=True))
            self.log.append(Trial(stage, encode(candidate), tuple(hosts), fmean(objectives)))


def _halves(count: int) -> list[int]:
    """57 → 29, 15, 8, 4: rounded up, and larger than FINALISTS."""
    sizes = []
    while (count := -(-count // 2)) > FINALISTS:
        sizes.append(count)
    return sizes


SHARES = (0.5, 0.2, 0.1)
"""Shares of the episodes for plans of one, two and three seeds; the rest is for the final."""


def search_schedule(search: Search[Plan], task: Task) -> tuple[Plan, float]:
    """The best plan and its mean objective; waiting, at 0 points, if no plan gains."""
    plans = one_seed_plans(task)
    if not plans:
        raise BadValueError(f"task {task.name!r}: its budget of {task.parameter_budget} parameters allows no seed")
    finalists = search.halve("one seed", plans, int(SHARES[0] * search.budget))[:2]
    best = finalists[0]
    for seeds, share in zip(range(2, MAX_SEEDS + 1), SHARES[1:], strict=True):
        longer = extensions(best, task)
        if not longer:
            break
        longest = search.halve(f"{seeds} seeds", longer, int(share * search.budget))[0]
        if search.ranked([best, longest])[0] is best:
            break
        best = longest
        finalists.append(best)
    chosen, mean = search.decide(finalists)
    return (chosen, mean) if mean > 0 else (Plan(), 0.0)


RANDOM_SHARE, NEAR_SHARE = 0.5, 0.25
"""Shares of the episodes for random configurations and for neighbours of the best; the rest is for the final."""
MOST_CHANGES = 3
"""Most fields in which a neighbour differs."""

Draws = dict[str, Callable[[random.Random], int | float | str]]


def search_heuristic(search: Search[HeuristicConfig], task: Task) -> tuple[HeuristicConfig, float]:
    """The best configuration and its mean objective. The default one is among the first and in the final."""
    default, draws, rng = HeuristicConfig(), ranges(task), search.rng("configurations")
    share = int(RANDOM_SHARE * search.budget)
    first = _collect(lambda: _build({name: draw(rng) for name, draw in draws.items()}), {default}, _affordable(share))
    drawn = search.halve("random", [default, *first], share)
    share = int(NEAR_SHARE * search.budget)
    near = _collect(lambda: vary(drawn[0], draws, rng), set(search.objectives), _affordable(share))
    varied = search.halve("near the best", near, share)
    return search.decide(list(dict.fromkeys((default, *drawn[:2], varied[0]))))


def ranges(task: Task) -> Draws:
    """How each threshold is drawn. Rent is part of the objective, not a threshold."""
    return {
        "patience": lambda rng: rng.randint(0, 5),
        "plateau": lambda rng: rng.uniform(0, 4),
        "at_once": lambda rng: rng.randint(1, len(task.slot_ids)),
        "germinate_left": lambda rng: rng.randint(8, max(8, task.steps - 1)),
        "choice": lambda rng: rng.choice(OFFER_CHOICES),
        "cost_weight": lambda rng: 10 ** rng.uniform(-2, 0.5),
        "training_steps": lambda rng: rng.randint(1, 6),
        "least_audition": lambda rng: rng.uniform(-4, 8),
        "trial": lambda rng: rng.randint(2, 10),
        "advance_left": lambda rng: rng.randint(5, 8),
        "least_contribution": lambda rng: rng.uniform(-2, 4),
        "prune_below": lambda rng: rng.uniform(-4, 2),
        "ending": lambda rng: rng.randint(1, 5),
        "errors": lambda rng: rng.uniform(0, 2),
    }


def vary(config: HeuristicConfig, draws: Draws, rng: random.Random) -> HeuristicConfig:
    """A neighbour: a few fields moved halfway towards a fresh draw."""
    values = asdict(config)
    for name in rng.sample(list(draws), rng.randint(1, MOST_CHANGES)):
        old, new = values[name], draws[name](rng)
        values[name] = new if isinstance(new, str) else type(new)((old + new) / 2)
    return _build(values)


def _build(values: dict[str, Any]) -> HeuristicConfig:  # Any: fields by name
    return HeuristicConfig(**{**values, "trial": max(values["trial"], values["training_steps"])})


def _affordable(episodes: int) -> int:
    """Number of candidates that a first rung can run on all its hosts."""
    return max(1, int(FIRST_SHARE * episodes) // FIRST_HOSTS)


def _collect(make: Callable[[], HeuristicConfig], known: set[HeuristicConfig], count: int) -> list[HeuristicConfig]:
    """This number of configurations, all different and none of them known."""
    configs: dict[HeuristicConfig, None] = {}
    while len(configs) < count:
        config = make()
        if config not in known:
            configs[config] = None
    return list(configs)
