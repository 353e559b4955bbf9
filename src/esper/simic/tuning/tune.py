"""`esper tune`: search a schedule or the heuristic's thresholds with a stated number of episodes, and store the best.

An episode is one grown host; controls are not counted, as in training. Hosts are of the tuning range, which neither
training nor evaluation uses.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import torch

from esper.leyline import BadValueError, EsperError, UnknownNameError, head_preset, objective
from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance, progress_bar
from esper.leyline.records import Json, encode
from esper.simic.evaluation.arena import Arena, MakePolicy, SideBySide, divide, hardened
from esper.simic.evaluation.workers import worker_pool
from esper.simic.evaluation.yardsticks import plan_policy
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import check_device, host_seed
from esper.simic.tuning.search import Evaluate, Search, Trial, search_heuristic, search_schedule
from esper.storage.files import replace_file
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, Plan
from esper.tamiyo.policies.shipped import CONTENT, FORMAT, TUNED_KINDS, TunedKind
from esper.tolaria import get_task

EPISODES = 480
"""The learner's default: 20 rounds × 24 grown hosts."""


@dataclass(frozen=True)
class Tuned:
    """The best candidate of a search, and all trials."""

    kind: TunedKind
    task: str
    best: Plan | HeuristicConfig
    objective: float
    """Mean on the hosts of the final, points"""
    budget: int
    """Episodes allowed"""
    used: int
    """Episodes run"""
    rng_seed: int
    log: tuple[Trial, ...]

    def to_json(self) -> dict[str, Json]:
        """The content of a tuned file."""
        search = {name: encode(getattr(self, name)) for name in ("budget", "used", "rng_seed", "objective", "log")}
        best = {CONTENT[self.kind]: encode(self.best)}
        return {"format": FORMAT, "kind": self.kind, "task": self.task, **best, "search": search}


def tune(
    task_name: str,
    kind: TunedKind,
    episodes: int = EPISODES,
    rng_seed: int = 0,
    *,
    preset: str = "core",
    data_dir: Path | None = None,
    device: str = "cpu",
    workers: int = 1,
    progress: bool = True,
) -> Tuned:
    """Search with at most this number of episodes. `rng_seed` determines everything random."""
    if kind not in TUNED_KINDS:
        raise UnknownNameError("kind of search", kind, TUNED_KINDS)
    require_whole("workers", workers, 1)
    check_device(device)
    task = get_task(task_name)
    ground = TuningGround(task_name, kind, head_preset(preset).name, rng_seed, device, data_dir)
    with (
        progress_bar(f"tuning the {kind}", episodes, shown=progress) as advance,
        evaluator(ground, workers, advance) as evaluate,
    ):
        search: Search[Any] = Search(evaluate, episodes, rng_seed)  # Any: plans or thresholds, as the kind says
        best, mean = (search_schedule if kind == "schedule" else search_heuristic)(search, task)
    return Tuned(kind, task_name, best, mean, search.budget, search.used, search.rng_seed, tuple(search.log))


@dataclass(frozen=True)
class TuningGround:
    """Where candidates are tried. Plain values, because it is sent to workers."""

    task: str
    kind: TunedKind
    preset: str
    rng_seed: int
    device: str = "cpu"
    data_dir: Path | None = None


@lru_cache(maxsize=1)
def open_arena(ground: TuningGround) -> Arena:
    """The fleets of a search."""
    return Arena(get_task(ground.task), head_preset(ground.preset), device=ground.device, data_dir=ground.data_dir)


def heuristic_policy(runner: EpisodeRunner, configs: Sequence[HeuristicConfig]) -> SideBySide:
    """A policy for groups whose members have one configuration each."""
    return SideBySide([HeuristicTamiyo(runner.table, runner.slots, config) for config in configs])


def try_candidates(
    ground: TuningGround, candidates: Sequence[Any], hosts: Sequence[int], advance: Advance | None = None
) -> list[list[float]]:
    """Objectives [candidate][host] on hosts of the tuning range, on validation images."""
    arena = open_arena(ground)
    make_policy: MakePolicy[Any] = plan_policy if ground.kind == "schedule" else heuristic_policy
    seeds = [host_seed("tuning", ground.rng_seed, number) for number in hosts]
    table = torch.zeros((len(hosts), len(candidates)), dtype=torch.float64)
    for block in arena.run(make_policy, candidates, seeds):
        accuracy, control, added = (column.double() for column in hardened(block.result))
        values = block.by_host(objective(accuracy - control, added, arena.task.host_parameters)).cpu()
        table[block.rows] = values
        if advance is not None:
            advance(values.numel(), f"best of these {float(values.mean(0).max()):+.1f}")
    objectives: list[list[float]] = table.T.tolist()
    return objectives


@contextmanager
def evaluator(ground: TuningGround, workers: int, advance: Advance) -> Iterator[Evaluate[Any]]:
    """Try candidates in this process, or in this number of processes."""
    if workers == 1:
        try:
            yield partial(try_candidates, ground, advance=advance)
        finally:
            open_arena.cache_clear()
        return
    with worker_pool(workers) as pool:
        yield partial(share_candidates, pool, workers, advance, ground)


def share_candidates(
    pool: Executor,
    workers: int,
    advance: Advance,
    ground: TuningGround,
    candidates: Sequence[Any],
    hosts: Sequence[int],
) -> list[list[float]]:
    """Objectives [candidate][host], measured by the processes of a pool."""
    table = [[0.0] * len(hosts) for _ in candidates]
    futures = {
        pool.submit(_try_in_worker, ground, [candidates[i] for i in some], [hosts[i] for i in these]): (some, these)
        for some, these in shares(len(candidates), len(hosts), workers)
    }
    for future in as_completed(futures):
        some, these = futures[future]
        rows = future.result()
        for index, row in zip(some, rows, strict=True):
            table[index][these.start : these.stop] = row
        advance(len(some) * len(these), f"best of these {max(sum(row) / len(row) for row in rows):+.1f}")
    return table


def shares(candidates: int, hosts: int, workers: int) -> list[tuple[range, range]]:
    """Divide candidates × hosts so that the slowest process finishes soonest.

    Every host of a part needs its own control, so parts with many candidates are cheap; but too few parts leave
    processes idle.
    """

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


def _try_in_worker(ground: TuningGround, candidates: Sequence[Any], hosts: Sequence[int]) -> list[list[float]]:
    try:
        return try_candidates(ground, candidates, hosts)
    except EsperError as error:
        raise BadValueError(str(error)) from None  # errors with arguments of their own cannot be sent back


def check_free(path: Path) -> None:
    """Raise unless a tuned file can be written here; checked before the search, which may take an hour."""
    if path.exists():
        raise BadValueError(f"{path} exists, and an evaluation may have used it; choose another --out")
    if not path.resolve().parent.is_dir():
        raise BadValueError(f"{path} cannot be written: there is no folder {path.parent}")


def write_tuned(path: Path, tuned: Tuned) -> None:
    """Write the file atomically; an existing file is not overwritten."""
    check_free(path)
    replace_file(path, json.dumps(tuned.to_json(), indent=1, allow_nan=False) + "\n")
