"""Trials of candidates on hosts of the tuning range, which neither training nor evaluation uses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import HeadPreset, head_preset, objective
from esper.leyline.progress import Advance, ignore
from esper.leyline.records import checksum, encode
from esper.simic.evaluation.arena import Arena, Lineups, MakePolicy, SideBySide, distinct, divide, open_arena
from esper.simic.evaluation.workers import RunAll
from esper.simic.evaluation.yardsticks import plan_policy
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.offline.shards import SUFFIX
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import host_seed
from esper.simic.training.tape import EpisodeTape, record_header
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.shipped import TunedKind
from esper.tolaria import Task, get_task


def heuristic_policy(runner: EpisodeRunner, lineups: Lineups[HeuristicConfig]) -> SideBySide:
    """A policy for groups whose members have one configuration each, the same in all groups."""
    assert all(lineup == lineups[0] for lineup in lineups), "rules side by side need one lineup for all hosts"
    return SideBySide([HeuristicTamiyo(runner.table, runner.slots, config) for config in lineups[0]])


@dataclass(frozen=True)
class Trials:
    """Tries candidates on hosts of the tuning range. Plain values, because it is sent to workers."""

    task: str
    kind: TunedKind
    preset: str
    rng_seed: int
    device: str = "cpu"
    data_dir: Path | None = None
    record: Path | None = None
    defect: str = ""  # the kind of its hosts, numbered among themselves; empty: all hosts
    arena: Arena | None = None  # where they are tried in this process; None: one of its own

    def __call__(
        self, run_all: RunAll, workers: int, advance: Advance, lineups: Lineups[Any], hosts: Sequence[int]
    ) -> list[list[float]]:
        """Objectives [host][candidate] of each host's candidates, on validation images."""
        width = len(lineups[0])
        table = torch.zeros((len(hosts), width), dtype=torch.float64)
        run_share = partial(self.run_share, lineups, hosts, advance if workers == 1 else ignore)
        for (some, these), objectives in run_all(run_share, shares(width, len(hosts), workers)):
            table[these.start : these.stop, some.start : some.stop] = objectives
            if workers > 1:
                advance(objectives.numel())
        return [[float(value) for value in row] for row in table]

    def run_share(
        self, lineups: Lineups[Any], hosts: Sequence[int], advance: Advance, share: tuple[range, range]
    ) -> Tensor:
        """Objectives (hosts, candidates) of one share, both given by index."""
        arena = self.arena or open_arena(
            get_task(self.task), head_preset(self.preset), device=self.device, data_dir=self.data_dir
        )
        make_policy: MakePolicy[Any] = heuristic_policy if self.kind == "heuristic" else plan_policy
        seeds = self.seeds([hosts[index] for index in share[1]])
        some = [[lineups[host][index] for index in share[0]] for host in share[1]]
        store = None if self.record is None else SearchStore(self.record, arena.task, arena.preset)
        return arena.run(make_policy, some, seeds, _objectives, advance, store)

    def seeds(self, hosts: Sequence[int]) -> list[int]:
        """The seeds of these hosts."""
        if not self.defect:
            return [host_seed("tuning", self.rng_seed, host) for host in hosts]
        alike = _hosts_of_kind(self.task, self.rng_seed, self.defect, max(hosts) + 1)
        return [alike[host] for host in hosts]


def _hosts_of_kind(task_name: str, rng_seed: int, defect: str, many: int) -> list[int]:
    """The first seeds of the tuning range whose hosts have this defect."""
    task = get_task(task_name)
    seeds = (host_seed("tuning", rng_seed, number) for number in count())
    return list(islice((seed for seed in seeds if task.defect_of(seed) == defect), many))


class SearchStore:
    """Record files of a search, named by candidates and hosts. What an earlier process recorded is not played again."""

    def __init__(self, folder: Path, task: Task, preset: HeadPreset) -> None:
        self.folder, self.task, self.preset = folder, task, preset

    def read(self, lineups: Lineups[Any], seeds: Sequence[int]) -> Tensor | None:
        """Objectives (hosts, candidates) of a block, if all its episodes are recorded."""
        files = sorted(self.folder.glob(f"{self._name(lineups, seeds)}-*{SUFFIX}"))
        if not files:
            return None
        episodes, width = Records.open(files).episodes(), len(lineups[0])
        if len(episodes.policy) < len(seeds) * width:
            for file in files:
                file.unlink()  # of a process that was killed between two files
            return None
        columns = (episodes.final_gain, episodes.fossil_parameters[:, -1], episodes.host_parameters)
        return objective(*(column.double() for column in columns)).view(len(seeds), width)

    def write(self, lineups: Lineups[Any], seeds: Sequence[int], tape: EpisodeTape, members: int) -> None:
        """Record a block, without what was filled up."""
        names = {candidate: number for number, candidate in enumerate(distinct(lineups))}
        header = record_header(self.task, self.preset, [json.dumps(encode(candidate)) for candidate in names])
        pairs = [(host, member) for host in range(len(seeds)) for member in range(len(lineups[0]))]
        rows = [host * members + member for host, member in pairs]
        numbers = [names[lineups[host][member]] for host, member in pairs]
        with RecordWriter(self.folder, header, f"{self._name(lineups, seeds)}-") as writer:
            writer.append(tape.episodes(rows, numbers, [seeds[host] for host, _ in pairs]))

    def _name(self, lineups: Lineups[Any], seeds: Sequence[int]) -> str:
        # No search plays a candidate on a host twice, so no two blocks have one name.
        names = [json.dumps(encode(candidate)) for candidate in distinct(lineups)]
        return checksum({"policies": names, "hosts": list(seeds)})[:16]


def _objectives(runner: EpisodeRunner, result: StepResult) -> Tensor:
    # In single precision as far as records are, so that a record tells the same to the bit.
    columns = (result.hardened_gain, result.fossil_parameters, runner.host_sizes)
    return objective(*(column.double() for column in columns))


def shares(candidates: int, hosts: int, workers: int) -> list[tuple[range, range]]:
    """Divide candidates × hosts so that the slowest process finishes soonest; every host of a part needs a control."""

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
