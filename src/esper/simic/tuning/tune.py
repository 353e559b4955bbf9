"""`esper tune`: search a schedule or the heuristic's thresholds with a stated number of episodes, and store the best.

An episode is one grown host; controls are not counted, as in training. Hosts are of the tuning range, which neither
training nor evaluation uses.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError, head_preset, objective
from esper.leyline.progress import Advance, progress_bar
from esper.leyline.records import Json, encode
from esper.simic.evaluation.arena import MakePolicy, SideBySide, divide, hardened, open_arena
from esper.simic.evaluation.workers import RunAll, run_with
from esper.simic.evaluation.yardsticks import plan_policy
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import check_device, host_seed
from esper.simic.tuning.search import Search, Trial, search_heuristic, search_schedule
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
    check_device(device)
    task = get_task(task_name)
    trials = Trials(task_name, kind, head_preset(preset).name, rng_seed, device, data_dir)
    with progress_bar(f"tuning the {kind}", episodes, shown=progress) as advance, run_with(workers) as run_all:
        search: Search[Any] = Search(partial(trials, run_all, workers, advance), episodes, rng_seed)
        best, mean = (search_schedule if kind == "schedule" else search_heuristic)(search, task)
    return Tuned(kind, task_name, best, mean, search.budget, search.used, search.rng_seed, tuple(search.log))


def heuristic_policy(runner: EpisodeRunner, configs: Sequence[HeuristicConfig]) -> SideBySide:
    """A policy for groups whose members have one configuration each."""
    return SideBySide([HeuristicTamiyo(runner.table, runner.slots, config) for config in configs])


@dataclass(frozen=True)
class Trials:
    """Tries candidates on hosts of the tuning range. Plain values, because it is sent to workers."""

    task: str
    kind: TunedKind
    preset: str
    rng_seed: int
    device: str = "cpu"
    data_dir: Path | None = None

    def __call__(
        self, run_all: RunAll, workers: int, advance: Advance, candidates: Sequence[Any], hosts: Sequence[int]
    ) -> list[list[float]]:
        """Objectives [candidate][host], on validation images."""
        table = torch.zeros((len(hosts), len(candidates)), dtype=torch.float64)
        run_share = partial(self.run_share, candidates, hosts, advance if workers == 1 else None)
        for (some, these), objectives in run_all(run_share, shares(len(candidates), len(hosts), workers)):
            table[these.start : these.stop, some.start : some.stop] = objectives
            if workers > 1:
                advance(objectives.numel())
        rows: list[list[float]] = table.T.tolist()
        return rows

    def run_share(
        self, candidates: Sequence[Any], hosts: Sequence[int], advance: Advance | None, share: tuple[range, range]
    ) -> Tensor:
        """Objectives (hosts, candidates) of one share, both given by index."""
        arena = open_arena(get_task(self.task), head_preset(self.preset), device=self.device, data_dir=self.data_dir)
        make_policy: MakePolicy[Any] = plan_policy if self.kind == "schedule" else heuristic_policy
        seeds = [host_seed("tuning", self.rng_seed, hosts[index]) for index in share[1]]
        return arena.run(make_policy, [candidates[index] for index in share[0]], seeds, _objectives, advance)


def _objectives(runner: EpisodeRunner, result: StepResult) -> Tensor:
    accuracy, control, added = (column.double() for column in hardened(result))
    return objective(accuracy - control, added, runner.fleet.task.host_parameters)


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
