"""The trials of a search shared between processes, each with a fleet of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Generic, TypeVar

from esper.leyline import BadValueError, EsperError, head_preset
from esper.leyline.progress import Advance
from esper.simic.evaluation.arena import Arena, MakePolicy, Trials, divide
from esper.simic.evaluation.workers import worker_pool
from esper.simic.tuning.candidates import HeuristicByEnv, plan_policy
from esper.tamiyo.policies.shipped import TunedKind
from esper.tolaria import get_task

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Place:
    """Where candidates are tried; small enough to be sent to a process."""

    task: str
    kind: TunedKind
    preset: str
    rng_seed: int
    rho: float
    device: str
    data_dir: Path | None

    def open(self, advance: Advance) -> Trials[Any]:  # Any: plans or thresholds, as the kind says
        """The trials, in this process."""
        task = get_task(self.task)
        make: MakePolicy[Any] = partial(plan_policy if self.kind == "schedule" else HeuristicByEnv, task)
        arena = Arena(task, head_preset(self.preset), make, device=self.device, data_dir=self.data_dir)
        return Trials(arena, self.rng_seed, self.rho, advance)


class SharedTrials(Generic[Candidate]):
    """As `Trials`, in the processes of a pool that `workers_at` has begun."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int, advance: Advance) -> None:
        self.pool, self.workers, self.advance = pool, workers, advance

    def __call__(self, candidates: Sequence[Candidate], hosts: Sequence[int]) -> list[list[float]]:
        """Objectives [candidate][host]."""
        found = [[0.0] * len(hosts) for _ in candidates]
        parts = shares(len(candidates), len(hosts), self.workers)
        jobs = {
            self.pool.submit(_try, [candidates[place] for place in some], [hosts[place] for place in these]): part
            for part in parts
            for some, these in [part]
        }
        for done in as_completed(jobs):
            some, these = jobs[done]
            objectives = done.result()
            for place, row in zip(some, objectives, strict=True):
                found[place][these.start : these.stop] = row
            best = max(sum(row) / len(row) for row in objectives)
            self.advance(len(some) * len(these), f"best of these {best:+.1f}")
        return found


def workers_at(place: Place, workers: int) -> AbstractContextManager[ProcessPoolExecutor]:
    """Processes of one thread each, for candidates of this place."""
    return worker_pool(workers, _begin, place)


def shares(candidates: int, hosts: int, workers: int) -> list[tuple[range, range]]:
    """Candidates × hosts cut into parts so that the slowest process is done soonest: every host of a part needs a
    control of its own, so parts of many candidates are cheap, and too few parts leave processes without work."""

    def longest(cut: tuple[int, int]) -> tuple[int, int]:
        by_candidates, by_hosts = cut
        rounds = ceil(by_candidates * by_hosts / workers)
        return rounds * ceil(hosts / by_hosts) * (ceil(candidates / by_candidates) + 1), by_candidates * by_hosts

    cuts = [(a, b) for a in range(1, min(candidates, workers) + 1) for b in range(1, min(hosts, workers) + 1)]
    by_candidates, by_hosts = min(cuts, key=longest)
    return [
        (some, these)
        for some in divide(candidates, ceil(candidates / by_candidates))
        for these in divide(hosts, ceil(hosts / by_hosts))
    ]


# -- in a worker process ----------------------------------------------------------------------------------------------

_place: Place | None = None
_trials: Callable[[Sequence[Any], Sequence[int]], list[list[float]]] | None = None


def _begin(place: Place) -> None:
    global _place
    _place = place


def _try(candidates: Sequence[Any], hosts: Sequence[int]) -> list[list[float]]:
    """The first one opens the fleet, not `_begin`: what goes wrong there would break the pool without a word."""
    global _trials
    assert _place is not None
    try:
        if _trials is None:
            _trials = _place.open(lambda amount, words="": None)
        return _trials(candidates, hosts)
    except EsperError as error:
        raise BadValueError(str(error)) from None  # errors with arguments of their own do not survive the way back
